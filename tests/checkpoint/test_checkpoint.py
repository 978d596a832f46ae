"""A lone process saves and loads: what is kept, what is refused, and in which words."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest
import torch

from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.reading import load_model_only
from mm_core.checkpoint.store import CheckpointStore, complete_steps
from mm_core.errors import CheckpointError

CONFIG = "run: {name: test}\n"


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run", keep=3)


def names(store: CheckpointStore) -> set[str]:
    return {path.name for path in store.folder.iterdir()}


def test_what_is_saved_is_what_is_loaded(store, state, empty, same):
    path = store.save(12, state, {"seed": 1234, "plugins": {"core": "0.1.0"}}, CONFIG)
    facts = store.load(path, empty)
    same(empty, state)
    assert facts == {"seed": 1234, "plugins": {"core": "0.1.0"}, "step": 12, "torch": str(torch.__version__)}
    assert OpenedCheckpoint(path).facts == facts
    assert path.name == "step_00000012"
    assert (path / "config.yaml").read_text() == CONFIG
    assert (store.folder / "LATEST").read_text() == "step_00000012\n"


def test_loading_fills_the_given_tensors_in_place(store, state):
    path = store.save(1, state, {}, CONFIG)
    parameter = torch.nn.Parameter(torch.zeros(7, 5))
    target = {part: {k: torch.zeros_like(v) for k, v in named.items()} for part, named in state.items()}
    target["model"]["blocks.0.weight"] = parameter
    store.load(path, target)
    assert target["model"]["blocks.0.weight"] is parameter
    assert torch.equal(parameter.detach(), state["model"]["blocks.0.weight"])


def test_a_state_without_optimizer_tensors(store, state):
    path = store.save(0, {"model": state["model"], "optimizer": {}}, {}, CONFIG)
    target = {"model": {k: torch.zeros_like(v) for k, v in state["model"].items()}, "optimizer": {}}
    store.load(path, target)
    assert all(torch.equal(target["model"][k], v) for k, v in state["model"].items())


def test_the_newest_stay_and_the_rest_goes(store, state):
    for step in (1, 2, 10, 20, 100):
        store.save(step, state, {}, CONFIG)
    assert names(store) == {"step_00000010", "step_00000020", "step_00000100", "LATEST"}
    assert store.latest() == store.folder / "step_00000100"


def test_a_checkpoint_saved_below_newer_ones_is_not_the_one_that_goes(tmp_path, state):
    CheckpointStore(tmp_path, keep=9).save(300, state, {}, CONFIG)
    store = CheckpointStore(tmp_path, keep=1)
    store.save(100, state, {}, CONFIG)
    assert complete_steps(store.folder).keys() == {100, 300}


def test_no_step_is_overwritten(store, state, empty, same):
    path = store.save(5, state, {}, CONFIG)
    with pytest.raises(CheckpointError) as caught:
        store.save(5, empty, {}, CONFIG)
    assert str(caught.value) == (
        f"{path}: this step already has a checkpoint, and checkpoints are never overwritten\n"
        "  hint: choose another run.name, or move the folder away"
    )
    store.load(path, empty)
    same(empty, state)


def test_a_run_is_refused_before_it_meets_newer_checkpoints(store, state):
    store.save(5, state, {}, CONFIG)
    store.begin(5)
    with pytest.raises(CheckpointError) as caught:
        store.begin(3)
    assert str(caught.value) == (
        f"{store.folder}: this run starts from step 3, but its folder holds checkpoints up to step 5\n"
        "  hint: resume with --resume auto, choose another run.name, or move the newer checkpoints away"
    )


def test_leftovers_of_dead_runs_never_count_and_go_at_the_next_start(store, state):
    store.save(5, state, {}, CONFIG)
    dead = store.folder / "step_00000009.tmp-deadbeef"
    shutil.copytree(store.folder / "step_00000005", dead)
    (store.folder / "LATEST.tmp-7").write_text("step_")
    assert store.latest().name == "step_00000005"
    assert CheckpointStore(store.folder.parent, 1).latest().name == "step_00000005"
    assert dead.exists(), "reading must not disturb a run that is saving"
    store.begin(5)
    assert names(store) == {"step_00000005", "LATEST"}


@pytest.mark.slow
def test_killed_while_it_saves(tmp_path, state, empty, same):
    """A process that saves without end is killed again and again: what stands is always whole."""
    script = textwrap.dedent(
        f"""
        import sys, torch
        from pathlib import Path
        from mm_core.checkpoint.store import CheckpointStore
        store = CheckpointStore(Path({str(tmp_path)!r}), keep=2)
        step = int((store.latest().name if store.latest() else "step_0").split("_")[1])
        store.begin(step)
        print("ready", flush=True)
        while True:
            step += 1
            tensors = {{"model": {{"w": torch.full((200_000,), float(step))}}}}
            store.save(step, tensors, {{}}, "x: 1\\n")
        """
    )
    store = CheckpointStore(tmp_path, keep=2)
    reached = 0
    for pause in (0.021, 0.033, 0.047, 0.5):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        time.sleep(pause)
        process.kill()
        process.communicate()
        newest = store.latest()
        if newest is not None:
            target = {"model": {"w": torch.zeros(200_000)}}
            step = store.load(newest, target)["step"]
            assert step >= reached
            reached = step
            assert bool((target["model"]["w"] == step).all())
    assert reached > 0
    store.begin(reached)
    assert not list(store.folder.glob("*.tmp-*"))


def test_a_full_disk_leaves_the_last_good_checkpoint(store, state, empty, same):
    """A limit on this process's files stands in for the end of the disk: an OSError of the same call."""
    good = store.save(1, state, {}, CONFIG)
    large = {"model": {"w": torch.zeros(100_000)}}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            store.save(2, large, {}, CONFIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(caught.value) == (
        "writing the checkpoint failed: [Errno 27] File too large\n"
        "  hint: check free space, quota and permissions of the run folder, on every node"
    )
    assert names(store) == {"step_00000001", "LATEST"}
    store.load(good, empty)
    same(empty, state)


def test_another_model_is_refused_by_every_name_before_anything_is_touched(store, state):
    path = store.save(1, state, {}, CONFIG)
    target = {
        "model": {
            "blocks.0.weight": torch.zeros(7, 6),
            "blocks.0.bias": torch.zeros(1),
            "tail": torch.zeros(2),
        },
        "optimizer": {"blocks.0.weight.exp_avg": torch.zeros(7, 5, dtype=torch.bfloat16)},
    }
    with pytest.raises(CheckpointError) as caught:
        store.load(path, target)
    assert str(caught.value) == (
        f"{path}: this checkpoint belongs to another model or optimizer: 1 missing: model.tail; "
        "2 unexpected: model.head, optimizer.blocks.0.weight.step; "
        "2 misshapen: model.blocks.0.weight (7x5 float32 in the checkpoint, 7x6 float32 in the model), "
        "optimizer.blocks.0.weight.exp_avg (7x5 float32 in the checkpoint, 7x5 bfloat16 in the model)\n"
        "  hint: compare its config.yaml with yours, or choose another run.name to start a new run"
    )
    assert all(not tensor.any() for named in target.values() for tensor in named.values())


def test_long_lists_of_names_are_cut_and_counted(store):
    path = store.save(1, {"model": {f"w{i:02d}": torch.zeros(1) for i in range(30)}}, {}, CONFIG)
    with pytest.raises(CheckpointError, match=r"30 unexpected: model.w00, .*model.w09, and 20 more"):
        store.load(path, {"model": {}})


def test_only_the_model_for_sampling(store, state):
    path = store.save(1, state, {"seed": 7}, CONFIG)
    for source in (path, store.folder, store.folder.parent):
        target = {k: torch.zeros_like(v, dtype=torch.float32) for k, v in state["model"].items()}
        assert load_model_only(source, target)["seed"] == 7
        assert all(torch.equal(target[k], v.float()) for k, v in state["model"].items())
    with pytest.raises(CheckpointError, match=r"2 unexpected: model\.blocks\.0\.bias, model\.head"):
        load_model_only(path, {"blocks.0.weight": torch.zeros(7, 5)})


def test_state_that_is_no_tensor_is_refused(store):
    with pytest.raises(
        CheckpointError, match=r"optimizer.lr cannot be saved .* float\n  accepted: tensors\n"
    ):
        store.save(1, {"model": {}, "optimizer": {"lr": 0.1}}, {}, CONFIG)
    with pytest.raises(CheckpointError, match="cannot be written as JSON"):
        store.save(1, {"model": {"w": torch.zeros(1)}}, {"generator": torch.Generator()}, CONFIG)
    assert names(store) == set()


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "facts.json", "config.yaml"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_file_is_refused_by_name(store, state, empty, name, damage):
    path = store.save(1, state, {}, CONFIG)
    file = path / name
    content = bytearray(file.read_bytes())
    size = len(content)
    if damage == "flip":
        content[size // 2] ^= 0x10
        file.write_bytes(content)
        words = f"{name} does not match its checksum"
    elif damage == "cut":
        file.write_bytes(content[:-3])
        words = f"{name} has {size - 3:,} bytes instead of {size:,}"
    else:
        file.unlink()
        words = f"{name} is missing"
    with pytest.raises(CheckpointError) as caught:
        store.load(path, empty)
    assert str(caught.value) == (
        f"{path}: this checkpoint is damaged: {words}\n  hint: resume from another checkpoint: --resume PATH"
    )
    assert all(bool((tensor == 9.0).all()) for named in empty.values() for tensor in named.values())


def test_a_damaged_or_foreign_checksum_file(store, state, empty):
    path = store.save(1, state, {}, CONFIG)
    manifest = json.loads((path / "checksums.json").read_text())
    for text, words in (
        ("{", r"checksums.json cannot be read \(JSONDecodeError\)"),
        (json.dumps(manifest | {"format": 2}), "this checkpoint has format 2\n  accepted: format 1"),
        (json.dumps({"format": 1, "files": {}}), "does not list .metadata, config.yaml, facts.json"),
        (
            json.dumps({"format": 1, "files": manifest["files"] | {"../x": {"size": 0, "crc32": "0"}}}),
            "lists '../x', which is not a file name",
        ),
    ):
        (path / "checksums.json").write_text(text)
        with pytest.raises(CheckpointError, match=words):
            store.load(path, empty)


def test_what_resume_accepts(store, state):
    assert store.resolve("auto") is None
    with pytest.raises(CheckpointError, match=f"^{store.folder.parent}: this run has no complete checkpoint"):
        store.resolve("last")
    path = store.save(3, state, {}, CONFIG)
    run = store.folder.parent
    assert store.resolve("never") is None
    assert store.resolve("auto") == store.resolve("last") == path
    assert store.resolve(str(path)) == store.resolve(str(run)) == store.resolve(str(store.folder)) == path


def test_what_resume_refuses(store, state, tmp_path):
    path = store.save(3, state, {}, CONFIG)
    half = shutil.copytree(path, store.folder / "step_00000004.tmp-0badcafe")
    torn = shutil.copytree(path, tmp_path / "torn" / "step_00000009")
    (torn / "checksums.json").unlink()
    (tmp_path / "bare" / "checkpoints").mkdir(parents=True)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    accepted = (
        "\n  accepted: 'auto', 'last', 'never', a checkpoint folder (runs/NAME/checkpoints/step_N) "
        "or a run folder (runs/NAME)"
    )
    for request, words in (
        (tmp_path / "absent", "this checkpoint does not exist"),
        (file, "this is a file, not a checkpoint folder"),
        (half, "this checkpoint is incomplete: its save never finished"),
        (torn, "this checkpoint is incomplete: its save never finished"),
        (tmp_path / "bare", "this run has no complete checkpoint"),
        (tmp_path, "this folder is neither a checkpoint nor a run"),
    ):
        with pytest.raises(CheckpointError) as caught:
            store.resolve(str(request))
        assert str(caught.value) == f"{request}: {words}{accepted}"


def test_a_moved_checkpoint_loads_and_contains_no_path(store, state, empty, same, tmp_path):
    path = store.save(3, state, {}, CONFIG)
    moved = path.rename(tmp_path / "elsewhere")
    assert os.fsencode(tmp_path) not in (moved / ".metadata").read_bytes()
    store.load(moved, empty)
    same(empty, state)


def test_torch_sums_its_own_files_as_before(store, state, tmp_path):
    """While a checkpoint is written torch leaves out its own sums, which ours make needless."""
    store.save(1, state, {}, "x: 1\n")
    assert torch.serialization.get_crc32_options()
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    with zipfile.ZipFile(tmp_path / "w.pt") as archive:
        assert archive.testzip() is None
