"""A checkpoint from a stranger: its checksums fit, and still nothing in it runs."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import io
import json
import os
import pickle
import shutil
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from mm_core.checkpoint.files.layout import read_checksums as read_sums
from mm_core.checkpoint.files.metadata import _FIELDS, read_metadata
from mm_core.checkpoint.reading import find_checkpoint, load_model_only, open_checkpoint
from mm_core.checkpoint.store import CheckpointStore
from mm_core.errors import CheckpointError


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
    """Replaces a file and fixes the checksums, as an attacker would."""
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
    refuse(
        path,
        empty,
        r"\.metadata, a pickle, asks to import (posix|nt)\.mkdir, which a checkpoint of mm_core never",
    )
    assert not sign.exists()


def test_metadata_with_a_bomb_inside(path, empty, sign):
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.planner_data["x"] = Bomb(sign)
    forge(path, ".metadata", pickle.dumps(metadata))
    refuse(path, empty, r"\.metadata, a pickle, asks to import")
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
    refuse(path, empty, rf"\.metadata, a pickle, asks to import {module}\.{attribute}")


def test_metadata_that_calls_an_allowed_name_wrongly(path, empty):
    forge(path, ".metadata", b"\x80\x04\x8c\x05torch\x8c\x07float32\x93)R.")
    refuse(path, empty, r"\.metadata cannot be read \(TypeError")


def test_metadata_that_is_something_else(path, empty):
    for content, words in (
        (b"", r"\.metadata cannot be read \(EOFError"),
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
    refuse(path, empty, r"\.metadata, a pickle, asks to import .*BytesStorageMetadata")


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
    refuse(path, empty, r"\.metadata does not list where all values of 'model\.head' are stored")


def written(path: Path):
    return pickle.loads((path / ".metadata").read_bytes())


@pytest.mark.parametrize("kind", ["Metadata", "MetadataIndex", "TensorStorageMetadata", "_StorageInfo"])
def test_metadata_whose_objects_carry_more_than_their_fields(path, empty, kind):
    """Whoever reads such an object may ask for the attribute, or take it from the class's own place."""
    metadata = written(path)
    objects = [
        metadata,
        *metadata.storage_data,
        *metadata.state_dict_metadata.values(),
        *metadata.storage_data.values(),
    ]
    chosen = next(one for one in objects if type(one).__name__ == kind)
    object.__setattr__(chosen, "__post_init__", ("a", "stranger"))
    forge(path, ".metadata", pickle.dumps(metadata))
    refuse(path, empty, rf"\.metadata sets the unknown field '__post_init__' on a {kind}")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("torch", "float32"),
    ],
)
def test_metadata_that_sets_an_attribute_on_a_class_or_function(path, empty, module, name):
    """BUILD, with the class itself in the place of an object: it would stay so changed in this process."""
    found = getattr(importlib.import_module(module), name)
    strings = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    state = b"N}\x8c\x08smuggled\x4b\x01s\x86"  # (None, {"smuggled": 1}): set one by one
    forge(path, ".metadata", b"\x80\x04" + strings + b"\x93" + state + b"b.")
    refuse(path, empty, r"\.metadata (does not describe a checkpoint|cannot be read)")
    assert not hasattr(found, "smuggled")


def test_metadata_that_sets_an_attribute_on_a_memory_format(path, empty):
    """A member of an enumeration is one object for the whole process."""
    module, name = torch_metadata.__name__, "_MEM_FORMAT_ENCODING"
    strings = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    build = b"}\x8c\x08smuggled\x4b\x01sb"
    forge(path, ".metadata", b"\x80\x04" + strings + b"\x93K\x00\x85R" + build + b".")
    refuse(path, empty, r"\.metadata (does not describe a checkpoint|cannot be read)")
    assert not any(hasattr(member, "smuggled") for member in torch_metadata._MEM_FORMAT_ENCODING)


def test_metadata_that_was_written_is_read_as_torch_reads_it(path):
    theirs, ours = written(path), read_metadata(path, read_sums(path))
    for entry in theirs.state_dict_metadata.values():
        entry.properties.strides = None  # of the saved tensor's memory, since torch 2.15; no reader uses it
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert all(type(index) is MetadataIndex for index in ours.storage_data)


def test_metadata_of_another_torch(path):
    """2.13 gives a Metadata a `version` that the class of 2.7 lacks, and 2.7 writes none."""
    for version in ("1.0", None):
        metadata = written(path)
        if version is None:
            vars(metadata).pop("version", None)
        else:
            metadata.version = version
        forge(path, ".metadata", pickle.dumps(metadata))
        assert read_metadata(path, read_sums(path)).storage_data == metadata.storage_data


def test_every_field_of_the_installed_torch_is_known():
    for kind, names in _FIELDS.items():
        assert {field.name for field in dataclasses.fields(kind)} <= names, f"{kind.__name__} has a new field"


@pytest.mark.parametrize("change", ["size", "chunk", "length", "offset"])
def test_metadata_whose_numbers_are_none(path, empty, change):
    metadata = written(path)
    entry = metadata.state_dict_metadata["model.head"]
    place = next(iter(metadata.storage_data.values()))
    if change == "size":
        entry.size = (4, 3)
    elif change == "chunk":
        entry.chunks[0].sizes = torch.Size([-4, -3])
    else:
        setattr(place, change, "many")
    forge(path, ".metadata", pickle.dumps(metadata))
    refuse(path, empty, r"\.metadata (does not describe a checkpoint|cannot be read \(ValueError)")


def packed(numbers: int) -> bytes:
    """A tensor of zeros as torch saves it, its archive packed again: a thousandth of the size."""
    whole, small = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(numbers), whole)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as target:
        for member in source.infolist():
            target.writestr(member.filename, source.read(member))
    return small.getvalue()


@pytest.mark.parametrize("claim", ["packed", "the same bytes twice"])
def test_a_tensor_that_unpacks_to_more_than_its_bytes(path, empty, claim):
    bomb = packed(1_000_000)
    if claim != "packed":  # the directory lists one member a hundred times
        whole = io.BytesIO()
        torch.save(torch.zeros(1000), whole)
        with zipfile.ZipFile(whole, "a") as archive:
            archive.filelist += [info for info in archive.filelist if info.file_size == 4000] * 100
            archive._didModify = True
        bomb = whole.getvalue()
    assert len(bomb) < 40_000
    metadata = written(path)
    for stored in metadata.storage_data.values():
        stored.offset, stored.length = 0, len(bomb)
    forge(path, "__0_0.distcp", bomb)
    forge(path, ".metadata", pickle.dumps(metadata))
    refuse(path, empty, rf"its {len(bomb):,} bytes unpack to [\d,]+, but torch.save never compresses")
    with pytest.raises(CheckpointError, match=r"__0_0.distcp contains a tensor that was refused: its "):
        CheckpointStore(path.parents[1], keep=1).open(str(path))


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


def test_metadata_whose_tensor_is_larger_than_any_memory(path, empty):
    """Refused by its shape, before anything is allocated."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    entry = metadata.state_dict_metadata["model.head"]
    entry.size = torch.Size([2**50, 3])
    entry.chunks[0].sizes = entry.size
    forge(path, ".metadata", pickle.dumps(metadata))
    refuse(path, empty, r"model\.head \(1125899906842624x3")


@pytest.mark.parametrize(("offset", "length"), [(-5, 10), (0, 2**60), (2**60, 10), (0, 0), (10, -5)])
def test_metadata_that_points_beside_the_file(path, empty, offset, length):
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for stored in metadata.storage_data.values():
        stored.offset, stored.length = offset, length
    forge(path, ".metadata", pickle.dumps(metadata))
    refuse(path, empty, r"\.metadata points beyond the bytes of __0_0\.distcp")


@pytest.mark.parametrize("name", ["__0_0.distcp", "facts.json", ".metadata"])
def test_links_out_of_the_folder(path, empty, tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    (path / name).rename(elsewhere)
    (path / name).symlink_to(elsewhere)
    refuse(path, empty, f"{name} is a symbolic link")


@pytest.mark.parametrize(
    "name", ["../../../../etc/passwd", "/etc/passwd", "a/b", "..", "", "__0_0.distcp/../../x"]
)
def test_checksums_that_name_files_elsewhere(path, empty, name):
    document = json.loads((path / "checksums.json").read_text())
    document["files"][name] = {"size": 1, "crc32": "00000000"}
    (path / "checksums.json").write_text(json.dumps(document))
    refuse(path, empty, r"checksums\.json lists '")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"format": 1, "files": {".metadata": {"size": 1e999, "crc32": "0"}}}',
        '{"format": 1, "files": {".metadata": {"size": "' + "9" * 5000 + '", "crc32": "0"}}}',
        '{"format": 1, "files": {".metadata": {"size": 1, "crc32": 5}}}',
        '{"format": 1, "files": [1]}',
        '{"format": 1}',
        "\xff",
    ],
    ids=["deep", "infinite", "long number", "no text", "a list", "nothing", "no utf-8"],
)
def test_checksums_that_are_no_checksums(path, empty, text):
    (path / "checksums.json").write_bytes(text.encode("latin-1"))
    refuse(path, empty, r"checksums\.json cannot be read")
    with pytest.raises(CheckpointError, match="every checkpoint of this run is damaged"):
        CheckpointStore(path.parents[1], keep=1).open("auto")


@pytest.mark.parametrize("name", ["facts.json", "manifest.json"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[" * 100_000, r"cannot be read \(RecursionError\)"),
        (b"\xff\xfe", r"cannot be read \(UnicodeDecodeError\)"),
        (b"[1, 2]", "contains no JSON object"),
        (pickle.dumps({"step": 1}), "cannot be read"),
    ],
    ids=["deep", "no utf-8", "a list", "a pickle"],
)
def test_facts_and_manifest_that_are_something_else(path, name, content, words):
    forge(path, name, content)
    asked = name.removesuffix(".json")
    with pytest.raises(CheckpointError, match=rf"{name} {words}"):
        getattr(open_checkpoint(path), asked)


@pytest.mark.parametrize("step", ['"1"', "null", "[]", "1.5"])
def test_facts_whose_step_is_no_number(path, empty, step):
    forge(path, "facts.json", b'{"step": ' + step.encode() + b"}")
    refuse(path, empty, r"facts\.json contains no step")


@pytest.mark.parametrize("marker", ["LATEST", "BEST"])
@pytest.mark.parametrize("text", [b"../../elsewhere/step_00000001\n", b"/etc\n", b"\xff", b"."])
def test_markers_that_point_outside_lead_nowhere(path, tmp_path, marker, text):
    """Names are looked for among this run's own checkpoints, never joined to a path."""
    shutil.copytree(path, tmp_path / "elsewhere" / path.name)
    (path.parent / marker).write_bytes(text)
    assert find_checkpoint(path.parents[1]) == path
    with pytest.raises(CheckpointError, match="this run has recorded no best checkpoint"):
        find_checkpoint(path.parents[1], "best")


@pytest.mark.parametrize("version", [3, [], None, "1"])
def test_checksums_of_an_unknown_format_do_not_end_a_resume_from_an_older_step(tmp_path, state, version):
    store = CheckpointStore(tmp_path / "run", keep=2)
    store.save(1, state, {}, "x: 1\n")
    newest = store.save(2, state, {}, "x: 1\n")
    document = json.loads((newest / "checksums.json").read_text())
    (newest / "checksums.json").write_text(json.dumps(document | {"format": version}))
    checkpoint, skipped = CheckpointStore(tmp_path / "run", keep=2).open("auto")
    assert checkpoint is not None
    assert checkpoint.folder.name != newest.name
    assert "this checkpoint has format" in str(skipped[0])
