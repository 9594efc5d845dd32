"""A forged file with a valid checksum is loaded or refused in one sentence, and asks for little memory."""

from __future__ import annotations

import json
import struct
import warnings
import zlib
from pathlib import Path

import pytest
import torch
from dubito.errors import FileFormatError, InputError
from first_version_files import FILES, network_of
from forging import try_out
from safetensors.torch import save as safetensors_bytes
from torch import nn

import dubito
from dubito import compression
from dubito.core import io
from dubito.uses.compression import coding, storage

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("file", sorted(FILES.iterdir()), ids=lambda file: file.stem)
def test_a_few_forgeries_of_every_file(file: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = try_out(file, 15, 0, tmp_path)
    assert set(found) <= {"loaded", "refused"}, found


def coded(header: object, *streams: bytes) -> bytes:
    packed = [coding.pack(part) for part in (json.dumps(header).encode(), *streams)]
    body = struct.pack("<4I", *map(len, packed)) + b"".join(packed)
    return storage.MAGIC + struct.pack("<I", zlib.crc32(body)) + body


class TestBombs:
    """A few bytes that ask for gigabytes; each is refused before anything is made of them."""

    model = nn.Linear(4, 3)

    def refused(self, path: Path, content: bytes, match: str) -> None:
        path.write_bytes(content)
        with pytest.raises(FileFormatError, match=match):
            compression.load(path, self.model)

    def test_zeros_in_a_shape(self, tmp_path: Path) -> None:
        content = coded([["weight", [60_000, 60_000], "float32", 0.1, 0, 1]], b"", b"\1", b"")
        assert len(content) < 200
        self.refused(
            tmp_path / "file", content, r"another network: 'weight' is \(60000, 60000\) in the file and \(3, 4\)"
        )

    def test_a_stream_of_zeros(self, tmp_path: Path) -> None:
        many = bytes(10**7)
        for streams in ((many, b"\1", b""), (b"", many, b""), (b"", b"\1", many)):
            content = coded([["weight", [3, 4], "float32", 0.1, 0, 1]], *streams)
            assert len(content) < 10**6
            self.refused(tmp_path / "file", content, r"more than the \d+ bytes that it should be")

    def test_a_header_of_spaces(self, tmp_path: Path) -> None:
        packed = [coding.pack(part) for part in (b"[" + b" " * 10**7 + b"]", b"", b"", b"")]
        body = struct.pack("<4I", *map(len, packed)) + b"".join(packed)
        content = storage.MAGIC + struct.pack("<I", zlib.crc32(body)) + body
        self.refused(tmp_path / "file", content, "more than the")

    def test_sparse_rows(self, tmp_path: Path) -> None:
        rows = {"values": torch.ones(1), "columns": torch.zeros(1).byte(), "starts": torch.zeros(2).byte()}
        for shape in ([10**5, 10**5], [1, 10**10], [-1, -(10**10)], [3, "4"], 5, [3, 4]):
            io.save(tmp_path / "file", storage.KIND, {"weight": {**rows, "shape": shape}})
            self.refused(
                tmp_path / "file", (tmp_path / "file").read_bytes(), "another network|cannot be|do not fit|invalid"
            )

    def test_a_selection_of_a_larger_network(self, tmp_path: Path) -> None:
        file = FILES / "Laplace-classification.safetensors"
        tree = io.load(file, "posterior")
        tree["state"]["selection"]["shapes"]["0.weight"] = [10**6, 10**6]
        io.save(tmp_path / "file", "posterior", tree)
        with pytest.raises(FileFormatError, match="belongs to another network"):
            dubito.load(tmp_path / "file", network_of("Laplace", "classification"))

    def test_members_without_weights(self, tmp_path: Path) -> None:
        tree = io.load(FILES / "Ensemble-classification.safetensors", "posterior")
        tree["state"]["members"] += [{**tree["state"]["members"][0], "state": {}} for _ in range(100)]
        io.save(tmp_path / "file", "posterior", tree)
        with pytest.raises(FileFormatError, match="not complete"):
            dubito.load(tmp_path / "file", network_of("Ensemble", "classification"))


def test_content_that_does_not_fit_together_is_named_when_it_is_used(tmp_path: Path) -> None:
    tree = io.load(FILES / "Variational-classification.safetensors", "posterior")
    tree["state"]["scale"] = tree["state"]["scale"][:-1]
    io.save(tmp_path / "file", "posterior", tree)
    posterior = dubito.load(tmp_path / "file", network_of("Variational", "classification"))
    for use in (lambda: posterior.predict(torch.ones(2, 4)), lambda: posterior.sample(1)):
        with pytest.raises(FileFormatError, match="file' lacks the content that a file of its kind must have"):
            use()


def test_a_file_cannot_run_what_it_names(tmp_path: Path) -> None:
    """Types are looked up among what is loaded, without running a module's own look-up, and are never called."""
    tree = io.load(FILES / "MAP-classification.safetensors", "posterior")
    for name in ("os:system", "subprocess:Popen.__init__", "dubito:HMC", "no_such_module:X", 3):
        settings = {**tree["settings"], "recipe": json.dumps({"$setting": "MAP", "prior_precision": {"$type": name}})}
        io.save(tmp_path / "file", "posterior", {**tree, "settings": settings})
        with pytest.raises(FileFormatError):
            dubito.load(tmp_path / "file", network_of("MAP", "classification"))


def test_a_model_that_is_none() -> None:
    for load in (dubito.load, compression.load):
        with pytest.raises(InputError, match=r"a torch.nn.Module.* (not|got) None"):
            load(FILES / "MAP-classification.safetensors", None)  # type: ignore[operator]


def test_foreign_families(tmp_path: Path) -> None:
    tree = io.load(FILES / "MAP-classification.safetensors", "posterior")
    for family in ("Oracle", None, ["MAP"], "Laplace", "Ensemble"):
        io.save(tmp_path / "file", "posterior", {**tree, "family": family})
        with pytest.raises(FileFormatError):
            dubito.load(tmp_path / "file", network_of("MAP", "classification"))


def test_deep_settings(tmp_path: Path) -> None:
    text = json.dumps({"format": 1, "kind": "posterior", "tree": None})
    for inside in ("[" * 5000 + "]" * 5000, '{"a":' * 5000 + "1" + "}" * 5000):
        header = text.replace("null", inside)
        content = safetensors_bytes({}, {"dubito": header, "sha256": io._checksum(header, {})})
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(FileFormatError):
            dubito.load(tmp_path / "file", network_of("MAP", "classification"))
