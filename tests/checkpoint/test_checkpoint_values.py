"""Files of a checkpoint with right sums and values that cannot be true: refused by name where the checkpoint
was asked for, passed over where an older one will do."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import threading
import zlib
from pathlib import Path

import pytest

from mm_core.checkpoint.files.facts import read_later
from mm_core.checkpoint.reading import open_checkpoint, stored_run
from mm_core.checkpoint.resume_check import check_resume
from mm_core.checkpoint.retention import complete_steps
from mm_core.checkpoint.run_lock import RunLock
from mm_core.checkpoint.store import CheckpointStore
from mm_core.errors import CheckpointError
from mm_core.runtime.ranks import Ranks
from support.checkpoints import chosen

CONFIG = "run: {name: test}\n"


@pytest.fixture
def store(tmp_path, state) -> CheckpointStore:
    """Two checkpoints, each with everything that a run writes."""
    made = CheckpointStore(tmp_path / "run", keep=5)
    for step in (6, 12):
        made.save(step, state, {"seed": 1, "samples": 48.0}, CONFIG, manifest={"world": 1, "config": {}})
    return made


@pytest.fixture
def newest(store) -> Path:
    return store.folder / "step_00000012"


def forge(path: Path, name: str, content: bytes) -> None:
    """Replaces a file, and its sums with it."""
    (path / name).write_bytes(content)
    document = json.loads((path / "checksums.json").read_text())
    document["files"][name] = {"size": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    (path / "checksums.json").write_text(json.dumps(document))


def refused(store: CheckpointStore, newest: Path, words: str) -> None:
    """By name with its path; with `auto` the older one is taken, and the error names the one that was not."""
    with pytest.raises(CheckpointError, match=re.escape(words)) as caught:
        store.open(str(newest))
    assert str(newest) in str(caught.value) and caught.value.hint
    older, faults = chosen(store, "auto")
    assert older == store.folder / "step_00000006"
    assert [fault.where for fault in faults] == [str(newest)] and words in faults[0].what


FACTS = {
    "a step below zero": ('{"step": -5}', "facts.json has an invalid value, step: -5"),
    "another step than the folder's": ('{"step": 11}', "facts.json has an invalid value, step: 11"),
    "a step that is true": ('{"step": true}', "facts.json contains no step"),
    "a step beyond counting": ('{"step": ' + "9" * 400 + "}", "facts.json has an invalid value, step: 9999"),
    "a step of more digits than Python reads": ('{"step": ' + "9" * 5000 + "}", "facts.json cannot be read"),
    "no step": ("{}", "facts.json contains no step"),
    "samples that are not a number": (
        '{"step": 12, "samples": NaN}',
        "facts.json cannot be read (ValueError)",
    ),
    "samples without end": ('{"step": 12, "samples": 1e999}', "facts.json cannot be read (ValueError)"),
    "samples below zero": ('{"step": 12, "samples": -1}', "facts.json has an invalid value, samples: -1"),
    "samples as a list": ('{"step": 12, "samples": [48]}', "facts.json has an invalid value, samples: [48]"),
    "a guard that is a list": ('{"step": 12, "guard": [1]}', "facts.json has an invalid value, guard: [1]"),
    "norms that are texts": (
        '{"step": 12, "guard": {"norms": ["x"]}}',
        'facts.json has an invalid value, guard: {"norms": ["x"]}',
    ),
    "counts that are lists": (
        '{"step": 12, "guard": {"in_all": []}}',
        'facts.json has an invalid value, guard: {"in_all": []}',
    ),
    "updates of the average": (
        '{"step": 12, "ema_updates": "many"}',
        'facts.json has an invalid value, ema_updates: "many"',
    ),
    "metrics as a list": (
        '{"step": 12, "metrics": [0.5]}',
        "facts.json has an invalid value, metrics: [0.5]",
    ),
    "a metric that is a mapping": (
        '{"step": 12, "metrics": {"loss": {}}}',
        'facts.json has an invalid value, metrics: {"loss": {}}',
    ),
    "what was imported": (
        '{"step": 12, "imported": "here"}',
        'facts.json has an invalid value, imported: "here"',
    ),
    "where the data stood": ('{"step": 12, "order": 3}', "facts.json has an invalid value, order: 3"),
    "deep": (
        '{"step": 12, "x": ' + "[" * 500 + "]" * 500 + "}",
        "facts.json cannot be read (RecursionError)",
    ),
}


@pytest.mark.parametrize(("text", "words"), FACTS.values(), ids=FACTS)
def test_facts_that_cannot_be_true(store, newest, text, words):
    forge(newest, "facts.json", text.encode())
    refused(store, newest, words)
    with pytest.raises(CheckpointError, match=r"facts\.json"):
        _ = open_checkpoint(newest).facts


MANIFESTS = {
    "components as a mapping": (
        '{"plugins": {"a": 1}}',
        'manifest.json has an invalid value, plugins: {"a": 1}',
    ),
    "components as texts": ('{"plugins": ["core"]}', 'manifest.json has an invalid value, plugins: ["core"]'),
    "a config that is a list": ('{"config": []}', "manifest.json has an invalid value, config: []"),
    "a section that is a list": (
        '{"config": {"train": [1]}, "adapters": []}',
        "manifest.json has an invalid value, config:",
    ),
    "data without datasets": (
        '{"data": {"train": 5}}',
        'manifest.json has an invalid value, data: {"train": 5}',
    ),
    "files of data as a list": (
        '{"data": {"train": {"files": []}}}',
        "manifest.json has an invalid value, data:",
    ),
    "an environment of numbers": (
        '{"environment": {"a": 1}}',
        "manifest.json has an invalid value, environment:",
    ),
    "versions as a text": ('{"versions": "3.11"}', 'manifest.json has an invalid value, versions: "3.11"'),
    "devices as null": ('{"devices": null}', "manifest.json has an invalid value, devices: null"),
    "less than no ranks": ('{"world": -2}', "manifest.json has an invalid value, world: -2"),
    "adapters as numbers": ('{"adapters": [3]}', "manifest.json has an invalid value, adapters: [3]"),
    "an adapter of no rank": (
        '{"adapters": [{"name": "a", "layers": [{"rank": -4, "alpha": 1, "dora": false, "rslora": false,'
        ' "modules": []}]}]}',
        "manifest.json: this checkpoint's record of its adapters cannot be read",
    ),
    "a base without a place": (
        '{"base": [{"key": "init_from"}]}',
        "manifest.json: the manifest entry about frozen weights in other files cannot be read",
    ),
    "a number without end": ('{"base": [{"tensors": 1e999}]}', "manifest.json cannot be read (ValueError)"),
    "deep": (
        '{"config": ' + '{"a": ' * 300 + "1" + "}" * 301,
        "manifest.json cannot be read (RecursionError)",
    ),
}


@pytest.mark.parametrize(("text", "words"), MANIFESTS.values(), ids=MANIFESTS)
def test_manifests_that_no_run_has_written(store, newest, text, words):
    forge(newest, "manifest.json", text.encode())
    refused(store, newest, words)


CONFIGS = {
    "a list": ("- run\n", "config.yaml: the file does not contain a mapping"),
    "empty": ("", "config.yaml: the file is empty"),
    "no text": ("\x00\x01", "config.yaml: this is not YAML"),
    "a section that is a list": ("run: [1]\n", "config.yaml: run is not a mapping"),
    "a section that is a number": ("run: {}\ntrain: 5\n", "config.yaml: train is not a mapping"),
    "a program": ("run: !!python/object/apply:os.system [id]\n", "config.yaml: "),
    "deep": ("run: " + "[" * 200 + "]" * 200, "config.yaml: "),
}


@pytest.mark.parametrize(("text", "words"), CONFIGS.values(), ids=CONFIGS)
def test_configs_that_are_none(store, newest, text, words):
    forge(newest, "config.yaml", text.encode())
    refused(store, newest, words)


def test_metadata_that_no_save_has_written(store, newest):
    forge(newest, ".metadata", b"\x80\x04N.")
    refused(store, newest, ".metadata does not describe a checkpoint")


@pytest.mark.parametrize(
    ("offset", "words"),
    [
        (-1, ".metadata points beyond the bytes of __0_0.distcp"),
        (-5, ".metadata points beyond the bytes of __0_0.distcp"),
        (2**70, ".metadata points beyond the bytes of __0_0.distcp"),
        (True, ".metadata does not describe a checkpoint"),
        (0.0, ".metadata does not describe a checkpoint"),
    ],
)
def test_metadata_of_bytes_that_are_not_there(store, newest, offset, words):
    """It ended `--resume auto` with the error for a full disk."""
    metadata = pickle.loads((newest / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).offset = offset
    forge(newest, ".metadata", pickle.dumps(metadata))
    refused(store, newest, words)


def test_a_file_larger_than_any_of_its_kind_is_not_read(store, newest, monkeypatch):
    monkeypatch.setattr("mm_core.checkpoint.files.layout._LARGEST", 1000)
    forge(newest, "manifest.json", b'{"x": "' + b"a" * 2000 + b'"}')
    refused(store, newest, "manifest.json cannot be read (ValueError)")


def test_all_of_them_wrong_is_one_error(store):
    for path in complete_steps(store.folder).values():
        forge(path, "facts.json", b'{"step": -5}')
    with pytest.raises(
        CheckpointError,
        match=r"every checkpoint of this run is damaged: facts\.json has an invalid value, step: -5",
    ):
        store.open("auto")


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["step_000000012", "step_٠٠٠٠٠٠١٢", "step_-0000012", "step_" + "9" * 40])
def test_folders_that_are_named_like_another_checkpoint(name, store, newest, state):
    """Two folders of one step, of which one hid the other, ended the next save by StopIteration."""
    shutil.copytree(newest, store.folder / name)
    assert complete_steps(store.folder) == {6: store.folder / "step_00000006", 12: newest}
    store.save(13, state, {"metrics": {"loss": 1.0}}, CONFIG)
    assert set(complete_steps(store.folder)) == {6, 12, 13}


def test_a_checkpoint_may_be_given_a_name_of_its_own(store, newest, tmp_path):
    shutil.copytree(newest, tmp_path / "the good one")
    assert open_checkpoint(tmp_path / "the good one").facts["step"] == 12


# -- what comes later, and the lock ----------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '{"metrics": [], "evaluated": true}',
        '{"metrics": {"loss": []}, "evaluated": true}',
        '{"metrics": {}, "evaluated": 1}',
        '{"metrics": {"loss": NaN}, "evaluated": true}',
        "[" * 100_000,
        "[]",
        "\xff",
    ],
)
def test_figures_of_a_validation_that_are_none_are_left_aside(store, newest, text):
    (newest / "validation.json").write_bytes(text.encode("latin-1"))
    assert read_later(newest) == {}
    assert "metrics" not in open_checkpoint(newest).facts
    assert chosen(store, "auto") == (newest, [])


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    """What it leads to would be emptied, and hold the name of this process."""
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(CheckpointError, match="the lock file of this run is a symbolic link"):
        RunLock(tmp_path / "run").take()
    assert (tmp_path / "precious").read_text() == "kept"


def test_a_lock_whose_holder_is_no_text(tmp_path):
    first = RunLock(tmp_path)
    first.take()
    (tmp_path / ".lock").write_bytes(b"\xff\xfe" + b"x" * 10_000)
    with pytest.raises(CheckpointError, match="this run is being trained by") as caught:
        RunLock(tmp_path).take()
    assert len(caught.value.what) < 250
    first.release()


@pytest.mark.parametrize("ended", [False, True])
def test_a_folder_that_is_another_runs_now_is_not_written_to(tmp_path, state, ended):
    """`mv run old` under a run that trains, and another one that begins as `run`."""
    first = CheckpointStore(tmp_path / "run", keep=5)
    first.begin(0)
    (tmp_path / "run/config.yaml").write_text(CONFIG)
    first.save(1, state, {}, CONFIG)
    (tmp_path / "run").rename(tmp_path / "old")
    second = CheckpointStore(tmp_path / "run", keep=5)
    second.begin(0)
    (tmp_path / "run/config.yaml").write_text(CONFIG)
    words = f"this run is being trained by process {os.getpid()} on "
    if ended:
        second.close()
        words = "was renamed during training, and another run has started in its place"
    for step in (2, 3):  # not even once it knows
        with pytest.raises(CheckpointError, match=words):
            first.save(step, state, {}, CONFIG)
    assert complete_steps(second.folder) == {} and list(complete_steps(tmp_path / "old/checkpoints")) == [1]
    if not ended:
        second.save(2, state, {}, CONFIG)
        second.close()
    first.close()


def test_manifests_of_older_versions_are_read(store, newest):
    forge(newest, "manifest.json", b"{}")
    assert open_checkpoint(newest).manifest == {} and chosen(store, "auto") == (newest, [])


@pytest.mark.parametrize("text", ["{}", '{"facts.json": "0"}', "[" * 100_000])
def test_checkpoints_of_older_versions_with_a_sha256_beside_their_files_are_like_any_other(
    text, store, newest, state, empty, same
):
    """No longer written or checked. They open, resume, stay and go."""
    for path in complete_steps(store.folder).values():
        (path / "sha256.json").write_text(text)
    assert chosen(store, "auto") == (newest, []) and chosen(store, str(newest)) == (newest, [])
    assert store.load(newest, empty)["step"] == 12
    same(empty, state)
    later = CheckpointStore(store.folder.parent, keep=2)
    later.begin(12)
    later.save(18, state, {}, CONFIG)
    later.close()
    assert sorted(path.name for path in store.folder.glob("step_*")) == ["step_00000012", "step_00000018"]
    assert (newest / "sha256.json").read_text() == text
    assert not (store.folder / "step_00000018/sha256.json").exists()


PARTS = {
    "predictor": "custom_dit",
    "autoencoder": "pixel",
    "text_encoder": "bytes",
    "scheduler": "flow_match",
}
SHAPE = {"num_frames": 1, "height": 8, "width": 8}


@pytest.mark.parametrize("value", ["process", "thread"])
def test_checkpoints_whose_config_names_a_way_to_save_that_was_removed_are_read_and_gone_on_from(
    value, store, newest
):
    """`stored_run` is what sampling, evaluation and export begin with; a resume compares manifests."""
    document = {
        "run": {"name": "a"},
        "task": {"type": "text_to_video", **PARTS},
        "data": {"train": {"type": "video_text", "annotations": "a.json", **SHAPE}},
        "train": {"steps": 10},
        "checkpoint": {"async": value},
    }
    forge(newest, "config.yaml", json.dumps(document).encode())
    forge(newest, "manifest.json", json.dumps({"config": {"checkpoint": {"async": value}}}).encode())
    stored = stored_run(store.folder.parent)
    assert stored.checkpoint.folder == newest and stored.config.checkpoint.async_ is True
    assert chosen(store, "auto") == (newest, [])
    (_, said) = check_resume(open_checkpoint(newest).manifest, {"config": {"checkpoint": {"async": True}}})
    assert said.split()[:5] == ["checkpoint.async", value, "->", "true", "safe"]


def test_hosts_with_a_folder_each_end_before_the_first_step(tmp_path):
    first, elsewhere, late = (RunLock(tmp_path / name) for name in ("shared", "other", "late"))
    first.take()
    elsewhere.take()  # of an earlier run there, by another process
    holder = first.read()
    RunLock(tmp_path / "shared").check_shared(holder, seconds=0.0)
    (tmp_path / "late").mkdir()
    writer = threading.Timer(0.3, lambda: (tmp_path / "late/.lock").write_text(holder))
    writer.start()
    late.check_shared(holder)
    for lock in (elsewhere, RunLock(tmp_path / "absent")):
        with pytest.raises(CheckpointError, match="does not see what rank 0 has written"):
            lock.check_shared(holder, seconds=0.3)
    RunLock(tmp_path / "absent").check_shared("", seconds=0.0)  # rank 0 could not read its own
    for lock in (first, elsewhere):
        lock.release()


def test_a_run_begins_only_where_its_ranks_see_the_first_ones_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(RunLock.check_shared, "__defaults__", (0.1,))
    CheckpointStore(tmp_path / "shared", keep=2).begin(0)
    monkeypatch.setattr(Ranks, "on_first", lambda ranks, doing, work: f"{work()}of another host")
    with pytest.raises(CheckpointError, match="does not see what rank 0 has written"):
        CheckpointStore(tmp_path / "own", keep=2).begin(0)
