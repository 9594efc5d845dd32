"""Files come back as they were, are whole or absent, and say so when they were damaged."""

from __future__ import annotations

import json
import os
import stat
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.errors import FileFormatError, InputError
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save as safetensors_bytes
from safetensors.torch import save_file
from torch import Tensor

from dubito.core import io

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


@st.composite
def small_tensors(draw: Any) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    values = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return values.to(draw(st.sampled_from(DTYPES)))


trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | small_tensors(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


class TestRoundTrip:
    @given(tree=trees)
    def test_any_tree(self, tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
        path = tmp_path_factory.mktemp("io") / "file"
        io.save(path, "tree", tree)
        assert same(tree, io.load(path, "tree"))

    def test_names_that_look_like_paths_do_not_collide(self, tmp_path: Path) -> None:
        tree = {"a": {"b": torch.tensor(1)}, "a/b": torch.tensor(2), "a~1b": torch.tensor(3), "a~0": torch.tensor(4)}
        tree |= {"a~": torch.tensor(5), "": torch.tensor(6), "$tensor": torch.tensor(7), "$dict": 8}
        io.save(tmp_path / "file", "tree", tree)
        assert same(tree, io.load(tmp_path / "file", "tree"))

    def test_views_and_shared_memory(self, tmp_path: Path) -> None:
        base = torch.arange(12.0).reshape(3, 4)
        tree = {"whole": base, "column": base[:, 1], "transposed": base.t(), "expanded": torch.ones(1).expand(5)}
        io.save(tmp_path / "file", "tree", tree)
        again = io.load(tmp_path / "file", "tree")
        assert same(tree, again)
        again["whole"].zero_()
        assert again["column"].tolist() == [1.0, 5.0, 9.0]

    def test_what_was_loaded_outlives_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        io.save(path, "tree", {"x": torch.arange(1000.0)})
        tree = io.load(path, "tree")
        path.write_bytes(b"")
        assert torch.equal(tree["x"], torch.arange(1000.0))

    def test_gradients_are_not_saved(self, tmp_path: Path) -> None:
        io.save(tmp_path / "file", "tree", [torch.ones(2, requires_grad=True) * 2])
        assert io.load(tmp_path / "file", "tree")[0].tolist() == [2.0, 2.0]

    @pytest.mark.parametrize(
        ("tree", "message"),
        [({1: 2}, "text as keys, not 1"), ({"a": object()}, "not a object"), ([{"b": {1, 2}}], "not a set")],
    )
    def test_what_cannot_be_saved(self, tmp_path: Path, tree: Any, message: str) -> None:
        with pytest.raises(InputError, match=message):
            io.save(tmp_path / "file", "tree", tree)
        assert list(tmp_path.iterdir()) == []


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved"
    io.save(path, "tree", {"x": torch.arange(6.0), "n": 3, "name": "plain", "flag": torch.tensor(True)})
    return path


class TestDamage:
    def test_truncated_anywhere(self, saved: Path) -> None:
        content = saved.read_bytes()
        for size in range(len(content)):
            saved.write_bytes(content[:size])
            with pytest.raises(FileFormatError):
                io.load(saved, "tree")

    def test_one_bit_flipped_in_any_byte(self, saved: Path) -> None:
        content = saved.read_bytes()
        for position in range(len(content)):
            changed = bytearray(content)
            changed[position] ^= 1 << (position % 8)
            saved.write_bytes(bytes(changed))
            with pytest.raises(FileFormatError, match=r"truncated|not written by|altered"):
                io.load(saved, "tree")

    def test_bytes_added(self, saved: Path) -> None:
        saved.write_bytes(saved.read_bytes() + b"\0")
        with pytest.raises(FileFormatError):
            io.load(saved, "tree")

    def test_tensors_exchanged(self, saved: Path) -> None:
        content = saved.read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + length])
        foreign = {"/x": torch.arange(6.0) + 1, "/flag": torch.tensor(True)}
        saved.write_bytes(safetensors_bytes(foreign, header["__metadata__"]))
        with pytest.raises(FileFormatError, match="its checksum does not match"):
            io.load(saved, "tree")

    @pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x04.", b"PK\x03\x04", b"{}" * 100])
    def test_a_foreign_file(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(FileFormatError, match="truncated or is not a Dubito file"):
            io.load(tmp_path / "file", "tree")

    def test_a_foreign_safetensors_file(self, tmp_path: Path) -> None:
        save_file({"x": torch.zeros(2)}, tmp_path / "file", metadata={"format": "pt"})
        with pytest.raises(FileFormatError, match="was not written by Dubito"):
            io.load(tmp_path / "file", "tree")

    def test_no_file_and_a_folder(self, tmp_path: Path) -> None:
        for path in (tmp_path / "nothing", tmp_path):
            with pytest.raises(FileFormatError, match="There is no file"):
                io.load(path, "tree")

    def test_another_kind(self, saved: Path) -> None:
        with pytest.raises(FileFormatError, match="holds a tree, not a posterior"):
            io.load(saved, "posterior")

    def test_a_newer_version(self, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(io, "FORMAT_VERSION", 2)
            io.save(saved, "tree", {"x": 1})
        with pytest.raises(FileFormatError, match=r"newer Dubito \(format 2\): please upgrade"):
            io.load(saved, "tree")


class TestAtomic:
    @pytest.mark.parametrize("function", ["fsync", "replace", "chmod"])
    def test_a_failed_write_leaves_the_old_file_and_nothing_else(
        self, saved: Path, monkeypatch: pytest.MonkeyPatch, function: str
    ) -> None:
        before = saved.read_bytes()

        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, function, fail)
        with pytest.raises(FileFormatError, match=r"Cannot write '.*saved': No space left on device"):
            io.save(saved, "tree", {"x": 2})
        assert saved.read_bytes() == before
        assert list(saved.parent.iterdir()) == [saved]

    def test_so_does_an_interrupted_one(self, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = saved.read_bytes()

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            io.save(saved, "tree", {"x": 2})
        assert saved.read_bytes() == before
        assert list(saved.parent.iterdir()) == [saved]

    def test_a_missing_folder(self, tmp_path: Path) -> None:
        with pytest.raises(FileFormatError, match=r"Cannot write '.*': No such file or directory"):
            io.save(tmp_path / "missing" / "file", "tree", {})

    def test_a_folder_in_its_place(self, tmp_path: Path) -> None:
        (tmp_path / "file").mkdir()
        with pytest.raises(FileFormatError, match="Cannot write"):
            io.save(tmp_path / "file", "tree", {})
        assert os.listdir(tmp_path) == ["file"]

    def test_the_usual_permissions(self, tmp_path: Path) -> None:
        io.write_atomic(tmp_path / "file", b"content")
        (tmp_path / "plain").touch()
        assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
        assert (tmp_path / "file").read_bytes() == b"content"


class TestTrees:
    def test_copy_into_keeps_aliases(self) -> None:
        weight = torch.zeros(2, requires_grad=True)
        state = {"params": {"w": weight}, "list": [weight.detach()], "step": 0, "samples": []}
        source = {"params": {"w": torch.ones(2)}, "list": [torch.ones(2)], "step": 5, "samples": [torch.ones(1)]}
        again = io.copy_into(state, source)
        assert again["params"]["w"] is weight
        assert weight.tolist() == [1.0, 1.0]
        assert again["list"][0].data_ptr() == weight.data_ptr()
        assert again["step"] == 5
        assert again["samples"][0].tolist() == [1.0]

    @pytest.mark.parametrize(
        "source", [{"w": torch.ones(3)}, {"v": torch.ones(2)}, {"w": 1}, {}, {"w": torch.ones(2), "v": 1}, 3]
    )
    def test_copy_into_refuses_what_does_not_fit(self, source: Any) -> None:
        with pytest.raises(InputError, match="does not fit this run"):
            io.copy_into({"w": torch.zeros(2)}, source)

    def test_clone_shares_nothing(self) -> None:
        tree = {"a": [torch.zeros(2, requires_grad=True)], "b": "text"}
        again = io.clone(tree)
        again["a"][0] += 1
        assert tree["a"][0].tolist() == [0.0, 0.0]
        assert again["b"] == "text"
        assert not again["a"][0].requires_grad

    def test_all_tensors_are_found(self) -> None:
        tree = {"a": [torch.tensor(1), {"b": torch.tensor(2)}], "c": "text", "d": (torch.tensor(3),)}
        assert [tensor.item() for tensor in io.tensors(tree)] == [1, 2, 3]
