"""An export is complete or absent: killed, on a full disk, from a damaged checkpoint; and its memory."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from mm_core.checkpoint.reading import checkpoint_at
from mm_core.checkpoint.store import CheckpointStore
from mm_core.config.dump import to_yaml
from mm_core.config.load import load_config
from mm_core.config.stored import remember
from mm_core.errors import CheckpointError, MMError
from mm_core.files import staged_folder
from mm_core.interchange.copied_files import copy_verbatim
from mm_core.interchange.export import export
from support import out_parts

SCRIPT = Path(__file__).with_name("export_once.py")
LAYERS, LARGE = 12, 3600  # 12 matrices of 51.8 MB


def make_run(folder: Path, layers: int, width: int, steps: tuple[int, ...] = (3,)) -> Path:
    """A run of matrices with one number each."""
    document = {
        "run": {"name": "large", "dir": str(folder)},
        "plugins": {"path": [out_parts.__file__]},
        "task": {"type": "local/large", "layers": layers, "width": width},
        "data": {
            "train": {"type": "video_text", "annotations": "x", "num_frames": 1, "height": 1, "width": 1}
        },
        "train": {"steps": 3},
    }
    path = folder / "large.yaml"
    path.write_text(yaml.safe_dump(document))
    config = load_config(path)
    remember(config)  # as its training does
    text = to_yaml(config)
    store = CheckpointStore(folder / "large", 9)
    for step in steps:
        model = {f"net.{i}.weight": torch.full((width, width), i + step + 0.5) for i in range(layers)}
        model |= {f"net.{i}.bias": torch.arange(width).float() for i in range(layers)}
        store.save(step, {"model": model}, {}, text)
    store.close()
    return folder / "large"


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("large"), LAYERS, LARGE)


@pytest.fixture
def small(tmp_path) -> Path:
    return make_run(tmp_path, 2, 40, (3, 5))


def begin(run: Path, out: Path) -> subprocess.Popen:
    command = [sys.executable, str(SCRIPT), str(run), str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def stages(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if ".tmp-" in path.name]


@pytest.mark.slow
def test_an_export_never_holds_the_model(large, tmp_path):
    """622 MB in, 311 MB out. torch 2.13 takes 104 MB, twice a tensor, and torch 2.7 231 MB."""
    process = begin(large, tmp_path / "out")
    figures = json.loads(process.communicate(timeout=120)[0])
    assert process.returncode == 0
    tensor = 4 * LARGE * LARGE
    assert figures["peak"] - figures["before"] < 4 * tensor + 60e6 < LAYERS * tensor / 2
    found = {n: t for file in (tmp_path / "out").glob("*.safetensors") for n, t in load_file(file).items()}
    assert len(found) == 2 * LAYERS
    assert all(bool((found[f"{i}.weight"] == i + 3.5).all()) for i in range(LAYERS))


@pytest.mark.slow
def test_an_export_that_is_killed_leaves_nothing_under_its_name(large, tmp_path):
    """Killed at seeded moments; the next export works, and removes the remains."""
    out, chance, killed_writing = tmp_path / "out", random.Random(4), 0
    for number in range(6):
        process = begin(large, out)
        while not (tmp_path / "out.ready").exists():
            time.sleep(0.01)
        # Two of six are killed at any moment after the start, four while they write.
        while number % 3 and not stages(tmp_path) and process.poll() is None:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.4))
        process.kill()
        process.communicate()
        assert not out.exists()
        killed_writing += bool(stages(tmp_path))
        (tmp_path / "out.ready").unlink()
    assert killed_writing >= 3
    process = begin(large, out)
    process.communicate(timeout=120)
    assert process.returncode == 0 and not stages(tmp_path)
    assert len(list(out.glob("*.safetensors"))) == 2


@contextmanager
def small_disk(folder: Path, size: str):
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder])
    if mounted.returncode:
        pytest.skip("only root may mount a small file system; the test below needs none")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_one_error(small, tmp_path):
    (tmp_path / "wide").mkdir()
    run = make_run(tmp_path / "wide", 2, 400)
    with small_disk(tmp_path / "disk", "1m") as disk:
        with pytest.raises(MMError) as caught:
            export(run, disk / "out", "safetensors")
        assert str(caught.value) == (
            f"{disk}/out: this folder could not be written and was removed again: the disk is full\n"
            "  hint: check free space, quota and permissions there, then run the command again"
        )
        assert not list(disk.iterdir())
        export(small, disk / "out", "safetensors")


def test_a_file_that_may_not_grow(small, tmp_path):
    """Simulates a full disk, where mounting one is not allowed."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(MMError, match="was removed again: File too large"):
            export(small, tmp_path / "out", "safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "out").exists() and not stages(tmp_path)


@pytest.mark.parametrize("what", ["bytes", "size", "file"])
def test_a_damaged_checkpoint_is_not_exported(what, small, tmp_path):
    shard = small / "checkpoints/step_00000005/__0_0.distcp"
    if what == "bytes":
        raw = bytearray(shard.read_bytes())
        raw[len(raw) // 2] ^= 1
        shard.write_bytes(raw)
    elif what == "size":
        os.truncate(shard, shard.stat().st_size - 1)
    else:
        shard.unlink()
    with pytest.raises(CheckpointError, match=r"this checkpoint is damaged: __0_0\.distcp"):
        export(small, tmp_path / "out", "safetensors")
    assert not (tmp_path / "out").exists() and not stages(tmp_path)
    export(f"{small}@3", tmp_path / "out", "safetensors")


def test_a_checkpoint_of_another_architecture(small, tmp_path):
    place = small / "checkpoints/step_00000005"
    changed = (place / "config.yaml").read_text().replace("layers: 2", "layers: 3")
    store = CheckpointStore(small, 9)
    model = {f"net.{i}.{part}": torch.ones(4, 4) for i in range(2) for part in ("weight", "bias")}
    store.save(6, {"model": model}, {}, changed)
    store.close()
    with pytest.raises(CheckpointError) as caught:
        export(small, tmp_path / "out", "safetensors")
    text = str(caught.value)
    assert "this checkpoint belongs to another model or optimizer: 2 missing: model.net.2.bias" in text
    assert "4 misshapen: model.net.0.bias (4x4 in the checkpoint, 40 in the model)" in text
    assert not (tmp_path / "out").exists() and not stages(tmp_path)


def test_what_fp16_cannot_hold(small, tmp_path):
    text = (small / "checkpoints/step_00000005/config.yaml").read_text()
    store = CheckpointStore(small, 9)
    model = {f"net.{i}.weight": torch.full((40, 40), 1e5) for i in range(2)}
    model |= {f"net.{i}.bias": torch.ones(40) for i in range(2)}
    store.save(6, {"model": model}, {}, text)
    store.close()
    with pytest.raises(MMError, match=r"net.0.weight contains values outside the range of fp16"):
        export(small, tmp_path / "out", "safetensors", dtype="fp16")
    assert not (tmp_path / "out").exists()


def test_which_checkpoint(small, tmp_path):
    place = small / "checkpoints"
    assert checkpoint_at(small) == checkpoint_at(f"{small}@latest") == place / "step_00000005"
    assert checkpoint_at(f"{small}@3") == checkpoint_at(place / "step_00000003") == place / "step_00000003"
    for step in ("4", "newest", "-3"):
        with pytest.raises(CheckpointError) as caught:
            checkpoint_at(f"{small}@{step}")
        assert f"this run has no complete checkpoint {step!r}\n  accepted: 3, 5, best, latest" in str(
            caught.value
        )
    odd = small.rename(tmp_path / "a@5")
    assert checkpoint_at(odd).parent.parent == odd


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_nothing_is_overwritten(kind, small, tmp_path):
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind == "folder":
        (out / "mine").mkdir(parents=True)
    else:
        out.symlink_to(tmp_path)
    with pytest.raises(MMError, match="this path exists already, and nothing is ever overwritten"):
        export(small, out, "safetensors")
    assert not stages(tmp_path)


def test_an_empty_folder_may_be_filled(small, tmp_path):
    (tmp_path / "out").mkdir()
    export(small, tmp_path / "out", "safetensors")
    assert (tmp_path / "out/model.safetensors").is_file()


def test_a_fault_or_an_interrupt_leaves_nothing(tmp_path):
    for fault in (KeyboardInterrupt(), OSError(errno.EDQUOT, "quota"), RuntimeError("odd")):
        with pytest.raises(BaseException) as caught, staged_folder(tmp_path / "new/out") as stage:
            (stage / "inner").mkdir()
            (stage / "inner/half").write_text("half")
            raise fault
        assert not list((tmp_path / "new").iterdir())
        if isinstance(fault, OSError):
            assert "was removed again: the quota is used up" in str(caught.value)
        else:
            assert caught.value is fault


def _ended() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_the_stage_of_a_live_process_is_left_alone(tmp_path):
    """Two exports to one name: the second to end finds it taken."""
    alive = tmp_path / f".out.tmp-00-{os.getppid()}@{os.uname().nodename}"
    dead = tmp_path / f".out.tmp-01-{_ended()}@{os.uname().nodename}"
    for folder in (alive, dead, tmp_path / ".other.tmp-02-1@elsewhere"):
        folder.mkdir()
    with staged_folder(tmp_path / "out"):
        assert len(stages(tmp_path)) == 3
    assert {path.name for path in stages(tmp_path)} == {alive.name, ".other.tmp-02-1@elsewhere"}
    with pytest.raises(MMError, match="this path exists already"), staged_folder(tmp_path / "twice"):
        (tmp_path / "twice").mkdir()
        (tmp_path / "twice/first").touch()


def test_what_is_taken_over(tmp_path):
    """Links within the folder, and those of a hub's cache, become files."""
    cache = tmp_path / "models--lab--model"
    snapshot = cache / "snapshots/abc/tokenizer"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (cache / "blobs/123").write_text("vocabulary")
    (snapshot / "vocab.json").symlink_to("../../../blobs/123")
    (snapshot / "deep").mkdir()
    (snapshot / "deep/again.json").symlink_to("../vocab.json")
    copy_verbatim(snapshot, tmp_path / "out/tokenizer")
    copy_verbatim(snapshot / "vocab.json", tmp_path / "out/vocab.json")
    copied = {
        str(path.relative_to(tmp_path / "out")): path.read_text()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file() and not path.is_symlink()
    }
    names = ("tokenizer/vocab.json", "tokenizer/deep/again.json", "vocab.json")
    assert copied == dict.fromkeys(names, "vocabulary")


@pytest.mark.parametrize("kind", ["outside", "folder", "pipe", "dangling"])
def test_what_is_not_taken_over(kind, tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("key")
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    odd = folder / "vocab.json"
    if kind == "pipe":
        os.mkfifo(odd)
    else:
        goal = {"outside": secret / "key", "folder": secret, "dangling": tmp_path / "none"}[kind]
        odd.symlink_to(goal)
    with pytest.raises(CheckpointError, match="this is a link out of it, or not a file"):
        copy_verbatim(folder, tmp_path / "out")
    if kind in ("outside", "dangling"):
        with pytest.raises(CheckpointError):
            copy_verbatim(odd, tmp_path / "copy.json")
