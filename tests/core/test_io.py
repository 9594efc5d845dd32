"""Files come back as they were, are whole or absent, and say so when they were damaged."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import struct
import subprocess
import sys
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
from dubito.core.atomic import reserve, write_atomic
from dubito.core.settings import digest

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
    @pytest.mark.slow
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

    def test_one_entry_at_any_stride(self, tmp_path: Path) -> None:
        one = torch.arange(10.0)[3::4][:1]
        tree = {"row": one, "matrix": torch.arange(6.0).reshape(2, 3).t()[1:2, 1:2], "short": one.half()[::1]}
        assert one.stride() == (4,)
        io.save(tmp_path / "file", "tree", tree)
        assert same(tree, io.load(tmp_path / "file", "tree"))
        assert digest(one) == digest(one.clone(memory_format=torch.contiguous_format)) != digest(one + 1)

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
        [({1: 2}, "must be text, got 1"), ({"a": object()}, "got a object"), ([{"b": {1, 2}}], "got a set")],
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


def forge(path: Path, header: Any, stored: dict[str, Tensor] | None = None) -> None:
    """Write a file with a valid checksum around any header, as somebody who knows the format could."""
    text, stored = header if isinstance(header, str) else json.dumps(header), stored or {}
    metadata = {"dubito": text, "sha256": io._checksum(text, stored)}
    path.write_bytes(safetensors_bytes(stored, metadata))


class TestForged:
    def test_whatever_the_header_holds(self, tmp_path: Path) -> None:
        good = {"format": 1, "kind": "tree"}
        headers = [
            "", "null", "[]", "1", "{", "[" * 10_000, "{" * 10_000, "9" * 10_000, {}, {"format": 1}, {"kind": "tree"},
            {"format": "1", "kind": "tree", "tree": None}, {"format": None}, good, {**good, "tree": {}},
            {**good, "tree": {"$tensor": "x"}}, {**good, "tree": {"$tensor": ["x"]}}, {**good, "tree": {"$dict": 3}},
            {**good, "tree": {"$dict": [["a"]]}}, {**good, "tree": {"$dict": [[1, 2]]}},
            {**good, "tree": {"$dict": [["a", 1, 2]]}}, {**good, "tree": {"$dict": {"a": 1}}},
        ]  # fmt: skip
        for header in headers:
            forge(tmp_path / "file", header)
            with pytest.raises(FileFormatError) as caught:
                io.load(tmp_path / "file", "tree")
            assert "\n" not in str(caught.value)

    def test_too_deep(self, tmp_path: Path) -> None:
        tree: Any = 1
        for _ in range(400):
            tree = [tree]
        forge(tmp_path / "file", {"format": 1, "kind": "tree", "tree": tree})
        with pytest.raises(FileFormatError, match="nested more than 100 levels"):
            io.load(tmp_path / "file", "tree")

    def test_one_tensor_in_many_places_and_in_none(self, tmp_path: Path) -> None:
        place = {"$tensor": "x"}
        for tree in ([place] * 1000, []):
            forge(tmp_path / "file", {"format": 1, "kind": "tree", "tree": tree}, {"x": torch.zeros(1000)})
            with pytest.raises(FileFormatError, match=r"KeyError|nothing refers to"):
                io.load(tmp_path / "file", "tree")


class TestReserve:
    def test_the_content_stays_and_the_space_is_there(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"content")
        for size in (2**16, 2**16, 3):
            with path.open("r+b") as stream:
                reserve(stream.fileno(), size)
            assert path.stat().st_size == 2**16
            assert path.stat().st_blocks * 512 >= 2**16
            assert path.read_bytes()[:7] == b"content"

    @pytest.mark.parametrize("error", [OSError(errno.EOPNOTSUPP, "not supported"), AttributeError()])
    def test_by_zeros_where_the_system_has_no_call_for_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        def fail(*_: Any) -> None:
            raise error

        monkeypatch.setattr(os, "posix_fallocate", fail)
        self.test_the_content_stays_and_the_space_is_there(tmp_path)


class TestAtomic:
    @pytest.mark.parametrize("function", ["fsync", "replace", "chmod", "open"])
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

    def test_the_permissions_of_the_old_file_are_kept(self, saved: Path) -> None:
        for mode in (0o600, 0o640, 0o444):
            saved.chmod(mode)
            io.save(saved, "tree", {"x": 2})
            assert stat.S_IMODE(saved.stat().st_mode) == mode

    def test_a_link_is_followed(self, saved: Path, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        link, dangling = tmp_path / "link", tmp_path / "dangling"
        link.symlink_to(saved)
        dangling.symlink_to(tmp_path / "elsewhere" / "new")
        for path in (link, dangling):
            io.save(path, "tree", {"x": 7})
            assert path.is_symlink()
            assert io.load(path, "tree") == {"x": 7}
        assert io.load(saved, "tree") == {"x": 7}
        assert (tmp_path / "elsewhere" / "new").is_file()

    def test_links_in_a_circle(self, tmp_path: Path) -> None:
        (tmp_path / "a").symlink_to(tmp_path / "b")
        (tmp_path / "b").symlink_to(tmp_path / "a")
        with pytest.raises(FileFormatError, match="Cannot write"):
            io.save(tmp_path / "a", "tree", {})

    def test_a_nul_within_the_name(self, tmp_path: Path) -> None:
        with pytest.raises(FileFormatError, match="embedded null byte"):
            io.save(tmp_path / "a\0b", "test", {})

    def test_a_pipe_a_device_and_a_folder_are_refused(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        for path, what in ((tmp_path / "pipe", "a pipe"), (Path("/dev/null"), "a device"), (tmp_path, "a folder")):
            before = stat.S_IFMT(path.stat().st_mode)
            with pytest.raises(FileFormatError, match=f"Cannot write '{path}': it is {what}.*choose another name"):
                write_atomic(path, b"content")
            assert stat.S_IFMT(path.stat().st_mode) == before

    def test_orphans_of_killed_writers_go_and_others_stay(self, saved: Path) -> None:
        gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
        dead, alive = int(gone.stdout), os.getpid()
        orphan, fresh, aged, locked, foreign = (
            saved.with_name(name)
            for name in (f".saved.dubito-{dead}.0", f".saved.dubito-{alive}.1", f".saved.dubito-{alive}.2",
                         f".saved.dubito-{dead}.3", ".other.dubito-1.x")
        )  # fmt: skip
        for path in (orphan, fresh, aged, locked, foreign):
            path.write_bytes(b"part")
        os.utime(aged, (0, 0))
        os.utime(locked, (0, 0))
        with locked.open("rb") as stream:  # a living writer on another machine, say
            fcntl.flock(stream, fcntl.LOCK_EX)
            io.save(saved, "tree", {"x": 2})
        assert {path.name for path in saved.parent.iterdir()} == {p.name for p in (saved, fresh, locked, foreign)}

    def test_a_long_name(self, tmp_path: Path) -> None:
        path = tmp_path / ("n" * 250)
        io.save(path, "tree", {"x": 2})
        assert io.load(path, "tree") == {"x": 2}

    def test_the_usual_permissions(self, tmp_path: Path) -> None:
        write_atomic(tmp_path / "file", b"content")
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

    @pytest.mark.parametrize("source", ["1", None, True, [1], {"a": 1}, torch.ones(1)])
    def test_copy_into_refuses_another_type(self, source: Any) -> None:
        with pytest.raises(InputError, match="does not fit this run"):
            io.copy_into({"step": 3}, {"step": source})
        assert io.copy_into({"step": None, "rate": 1}, {"step": source, "rate": 0.5})["rate"] == 0.5

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
