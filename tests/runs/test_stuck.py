"""A run that hangs ends by itself and names the rank that the others wait for, and where it stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.logs import log_of

pytestmark = pytest.mark.slow

PLUGIN = Path(__file__).with_name("sleepy_data.py")


def test_the_rank_that_hangs_is_named_with_its_line(tiny, shapes, tmp_path, mm):
    done = mm(
        "train", "--config", tiny, "--nproc", 2, f"run.dir={tmp_path}", f"plugins.path=[{PLUGIN}]",
        f"data.train={{type: local/sleepy, annotations: {shapes / 'data.json'}, num_frames: 8, height: 16,"
        " width: 16}", "data.loader.workers=0", "run.stuck_after=8",
    )  # fmt: skip
    assert done.code == 69, done.err
    sentences = [line for line in done.err.splitlines() if line.startswith("mm: error:")]
    assert len(sentences) == 1, "one rank speaks for all"
    line = next(n for n, text in enumerate(PLUGIN.read_text().splitlines(), 1) if "time.sleep" in text)
    assert "rank 1 is furthest behind, loading data for step 3, at" in sentences[0]
    assert f"{PLUGIN}:{line} in sample_at" in sentences[0]
    logs = tmp_path / "tiny/logs"
    assert "no progress in step 3, data; the stacks of all threads:" in (logs / "rank_1.log").read_text()
    assert "sleepy_data.py" in (logs / "rank_1.log").read_text()
    assert json.loads((logs / "heartbeat_1.json").read_text())["phase"] == "data"


@pytest.mark.parametrize(("stuck_after", "seconds"), [(100, 800), ("null", 3650 * 86400)])
def test_no_process_group_gives_up_before_the_watchdog_has_reported(stuck_after, seconds, tiny, tmp_path, mm):
    """A collective that times out reports that a rank was lost, and not where it is."""
    plugin = PLUGIN.with_name("patient_groups.py")
    done = mm(
        "train", "--config", tiny, "--nproc", 2, f"run.dir={tmp_path}", f"plugins.path=[{plugin}]",
        "callbacks=[{type: local/patience}]", f"run.stuck_after={stuck_after}", "train.steps=2",
        "lr_schedule={type: constant}",
    )  # fmt: skip
    assert done.code == 0, done.err
    for rank in (0, 1):
        waits = json.loads((tmp_path / f"tiny/patience_{rank}.json").read_text())
        # The default one, those of the mesh's two dimensions, and the one that saves are spoken of in.
        assert len(waits) >= 4 and set(waits) == {seconds}


def test_a_run_leaves_a_log_a_rank(tiny, tmp_path, mm):
    """With a line for each start, what was printed, and what ended it."""
    command = ("train", "--config", tiny, "--nproc", 2, f"run.dir={tmp_path}", "train.steps=2")
    assert mm(*command, "lr_schedule={type: constant}").code == 0
    broken = mm(*command, "train.freeze=[predictor.patch_embedding]", "lr_schedule={type: constant}")
    assert broken.code == 1
    logs = tmp_path / "tiny/logs"
    for rank in (0, 1):
        text = (logs / f"rank_{rank}.log").read_text()
        assert text.count(f"--- rank {rank} of 2, pid ") == 2
        assert "ended by CheckpointError: " in text and "train.freeze" in text
    assert "step 2/2  loss" in (logs / "rank_0.log").read_text()


def test_a_window_of_steps_is_profiled(tiny, tmp_path, mm):
    done = mm(
        "train", "--config", tiny, f"run.dir={tmp_path}", "train.steps=4", "lr_schedule={type: constant}",
        "profile={steps: [2, 3]}",
    )  # fmt: skip
    assert done.code == 0, done.err
    import gzip

    (trace,) = (tmp_path / "tiny/profile").glob("*.json.gz")
    assert trace.name == "rank_0_steps_2-3.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"ProfilerStep#1", "aten::mm"} & names and any("attention" in str(name) for name in names)
    assert "aten::" in (tmp_path / "tiny/profile/rank_0_steps_2-3.txt").read_text()


def test_epochs_and_overfitting_one_batch(tiny, tmp_path, mm):
    """8 steps are an epoch; one batch again and again has the same loss where the rate is 0."""
    done = mm(
        "train", "--config", tiny, f"run.dir={tmp_path}", "train.steps=null", "train.epochs=0.4",
        "--overfit-one-batch", "optimizer.lr=0.0", "lr_schedule={type: constant}", "task.caption_dropout=0.0",
    )  # fmt: skip
    assert done.code == 0, done.err
    rows = log_of(tmp_path / "tiny")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 4 and len(set(losses)) == 1
