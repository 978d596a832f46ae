"""`mm align` on real runs: equal runs have equal numbers, and a changed key is named."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.slow

ENGINES = {
    "recomputed": ('engine.recompute_modules=["predictor.blocks.{*}"]',),
    "deepspeed": ("engine={type: deepspeed}",),
    "two ranks": ("--nproc", 2),
}


@pytest.fixture(scope="module")
def record(tiny, mm, tmp_path_factory):
    """`record(*options)`: a record of two steps of the tiny run."""
    folder, made = tmp_path_factory.mktemp("records"), []

    def recorded(*options):
        made.append(folder / f"record_{len(made)}")
        done = mm("align", "record", "--config", tiny, "--steps", 2, "--out", made[-1], *options)
        assert done.code == 0, done.err
        assert "2 steps recorded" in done.out
        return made[-1]

    return recorded


@pytest.fixture(scope="module")
def plain(record):
    return record("--weights")


@pytest.mark.parametrize("engine", ENGINES)
def test_no_difference_is_found_where_there_is_none(engine, plain, record, mm):
    done = mm("align", "compare", plain, record(*ENGINES[engine]))
    assert done.code == 0 and " 0 different" in done.out, done.out


def test_two_ranks_repeat_every_bit_and_save_no_checkpoint(record, mm):
    one, other = (record("--nproc", 2) for _ in range(2))
    done = mm("align", "compare", one, other, "--tolerance", 0)
    assert done.code == 0 and "0 within the tolerance, 0 different" in done.out
    assert not list(one.rglob("step_*"))


def test_recording_changes_no_number_of_the_run(plain, tiny, tmp_path, mm):
    assert mm("train", "--config", tiny, f"run.dir={tmp_path}", "--stop-after", 2).code == 75
    rows = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (plain / "run", tmp_path / "tiny")
    ]
    for key in ("loss", "grad_norm", "lr"):
        assert [row[key] for row in rows[0]] == [row[key] for row in rows[1]]


def test_a_changed_key_is_named_with_what_it_changes(plain, record, mm, tmp_path):
    shifted = record("task.scheduler.shift=3", "--modules", "predictor.blocks.1*")
    done = mm("align", "compare", plain, shifted, "--html", tmp_path / "page.html")
    assert done.code == 1
    assert "FIRST DIFFERENCE\ngiven.latents: what the model computes from differs" in done.out
    assert "task.scheduler.shift: 5.0 | 3.0" in done.out
    assert "predictor.blocks.1" in (tmp_path / "page.html").read_text()
    listed = mm("align", "checklist", plain, shifted, "--json")
    assert listed.code == 1 and "config.task.scheduler.shift" in json.loads(listed.out)["different"]


def test_inputs_and_weights_of_another_record_are_fed(plain, record, mm):
    """Another seed draws other weights, noise and timesteps: fed, the run repeats every bit."""
    options = ("run.seed=99", "data.loader.sampler=sequential")
    done = mm("align", "compare", plain, record(*options))
    assert done.code == 1 and "the weights differ before" in done.out
    done = mm("align", "compare", plain, record(*options, "--like", plain), "--tolerance", 0)
    assert done.code == 0, done.out


def test_stored_tensors_are_compared_by_element(record, mm):
    one, other = (record("--modules", "*norm*", f"task.predictor.eps={eps}") for eps in ("1e-6", "1e-4"))
    done = mm("align", "compare", one, other)
    assert "norm1" in done.out.split("FIRST DIFFERENCE")[1].splitlines()[1]
    assert "ULP; the largest at [" in done.out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--steps", 20), "the run has only 12 steps"),
        (("--like", "none"), "holds no recorded inputs"),
    ],
)
def test_what_cannot_be_recorded_is_a_readable_error(options, sentence, tiny, tmp_path, mm):
    done = mm("align", "record", "--config", tiny, "--out", tmp_path / "record", *options)
    assert done.code == 1 and sentence in done.err


def test_a_record_that_failed_before_its_first_step_does_not_block_the_next(tiny, tmp_path, mm):
    command = ("align", "record", "--config", tiny, "--out", tmp_path / "record")
    missing = "the annotation file does not exist"
    for option, what in (("data.train.annotations=none.json", missing), ("--modules=none", "has the name")):
        done = mm(*command, option)
        assert done.code == 1 and what in done.err
        assert (tmp_path / "record/run/logs/rank_0.log").exists()
    assert mm(*command).code == 0
    (tmp_path / "record/record.json").unlink()
    (tmp_path / "record/rows_0.jsonl").unlink()
    done = mm(*command)  # its first step has been taken
    assert done.code == 1 and "is not empty" in done.err


def test_a_folder_that_is_not_empty_is_refused(tiny, tmp_path, mm):
    (tmp_path / "file").write_text("")
    done = mm("align", "record", "--config", tiny, "--out", tmp_path)
    assert done.code == 1 and "is not empty" in done.err
