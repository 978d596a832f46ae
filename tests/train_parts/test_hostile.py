"""A checkpoint from a stranger: its checksums fit, and still nothing in it runs."""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import zlib
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from mm_core.errors import CheckpointError
from mm_core.train.checkpoint import CheckpointStore
from mm_core.train.checkpoint_reading import load_model_only


class Bomb:
    """Unpickling it makes a folder: the sign that code has run."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self):
        return os.mkdir, (str(self.sign),)


@pytest.fixture
def path(tmp_path, state) -> Path:
    return CheckpointStore(tmp_path / "run", keep=1).save(1, state, {}, "x: 1\n")


@pytest.fixture
def sign(tmp_path) -> Path:
    return tmp_path / "code-has-run"


def forge(path: Path, name: str, content: bytes) -> None:
    """Replaces a file and mends the checksums, as an attacker would."""
    (path / name).write_bytes(content)
    document = json.loads((path / "checksums.json").read_text())
    document["files"][name] = {"size": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    (path / "checksums.json").write_text(json.dumps(document))


def refuse(path: Path, target, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        CheckpointStore(path.parents[1], keep=1).load(path, target)
    with pytest.raises(CheckpointError, match=words):
        load_model_only(path, target["model"])


def test_the_bomb_is_real(sign):
    pickle.loads(pickle.dumps(Bomb(sign)))
    assert sign.is_dir()


def test_metadata_that_is_a_bomb(path, empty, sign):
    forge(path, ".metadata", pickle.dumps(Bomb(sign)))
    refuse(path, empty, r"\.metadata asks for (posix|nt)\.mkdir, which no checkpoint of ours needs")
    assert not sign.exists()


def test_metadata_with_a_bomb_inside(path, empty, sign):
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.planner_data["x"] = Bomb(sign)
    forge(path, ".metadata", pickle.dumps(metadata))
    refuse(path, empty, r"\.metadata asks for")
    assert not sign.exists()


@pytest.mark.parametrize(
    "name",
    ["builtins.eval", "builtins.getattr", "torch.load", "torch.serialization.load", "torch.Size.__class__"],
)
def test_metadata_that_asks_for_any_other_name(path, empty, name):
    module, attribute = name.rsplit(".", 1) if "Size" not in name else ("torch", "Size.__class__")
    # Protocol 4 by hand: the two strings, STACK_GLOBAL, STOP.
    strings = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, attribute))
    forge(path, ".metadata", b"\x80\x04" + strings + b"\x93.")
    refuse(path, empty, rf"\.metadata asks for {module}\.{attribute}")


def test_metadata_that_calls_an_allowed_name_wrongly(path, empty):
    forge(path, ".metadata", b"\x80\x04\x8c\x05torch\x8c\x07float32\x93)R.")
    refuse(path, empty, r"\.metadata can not be read \(TypeError")


def test_metadata_that_is_something_else(path, empty):
    for content, words in (
        (b"", r"\.metadata can not be read \(EOFError"),
        (pickle.dumps([1, 2]), r"\.metadata does not describe a checkpoint"),
        (pickle.dumps({"state_dict_metadata": {}}), r"\.metadata does not describe a checkpoint"),
    ):
        forge(path, ".metadata", content)
        refuse(path, empty, words)


def test_metadata_that_calls_a_tensor_bytes(path, empty, sign):
    """torch would unpickle such an item freely."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.head"] = BytesStorageMetadata()
    forge(path, ".metadata", pickle.dumps(metadata))
    refuse(path, empty, r"\.metadata asks for .*BytesStorageMetadata")


def test_metadata_that_points_outside(path, empty, tmp_path):
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for stored in metadata.storage_data.values():
        stored.relative_path = "../../../elsewhere"
    forge(path, ".metadata", pickle.dumps(metadata))
    refuse(path, empty, r"\.metadata points outside the files of this checkpoint")


def test_metadata_that_leaves_a_hole(path, empty):
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.head"].chunks.clear()
    forge(path, ".metadata", pickle.dumps(metadata))
    refuse(path, empty, r"\.metadata does not cover the whole of 'model\.head'")


@pytest.mark.parametrize("kind", ["zip", "legacy", "raw"])
def test_tensor_files_that_are_bombs(path, empty, sign, kind):
    """Every tensor of the data file is replaced by a pickle that runs code when it is believed."""
    if kind == "raw":
        bomb = pickle.dumps(Bomb(sign))
    else:
        buffer = io.BytesIO()
        torch.save(
            collections.OrderedDict(w=Bomb(sign)), buffer, _use_new_zipfile_serialization=kind == "zip"
        )
        bomb = buffer.getvalue()
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for stored in metadata.storage_data.values():
        stored.offset, stored.length = 0, len(bomb)
    forge(path, "__0_0.distcp", bomb)
    forge(path, ".metadata", pickle.dumps(metadata))
    refuse(path, empty, "reading the checkpoint failed: UnpicklingError")
    assert not sign.exists()
