"""What `--verify-resume` compares, and that it finds a run that does not resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mm_core.checkpoint.store import CheckpointStore
from mm_core.cli.main import main
from mm_core.errors import MMError
from mm_core.training.verify_resume import compare_checkpoints, compare_runs, render
from support.checkpoints import make_state

CONFIG = "run: {name: test}\n"


@pytest.fixture
def written(tmp_path):
    """`written("name", facts, losses, change)`: a run of a state after `change(state)`, with metrics."""

    state = make_state()

    def write(name: str, facts=None, losses=(1.0, 0.5), change=lambda state: None) -> Path:
        parts = {part: {k: v.clone() for k, v in named.items()} for part, named in state.items()}
        parts["ema"] = {"head": torch.tensor([1.0, float("nan")])}
        change(parts)
        run = tmp_path / name
        CheckpointStore(run, keep=3).save(2, parts, facts or {"seed": 1}, CONFIG)
        rows = [{"step": step, "loss": loss, "lr": 1e-3} for step, loss in enumerate(losses, 1)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return run

    return write


def test_runs_with_the_same_bits_are_equal_also_where_they_are_not_finite(written):
    results, remarks = compare_runs(written("a"), written("b"))
    assert {(result.part, result.tensors, result.equal) for result in results} == {
        ("model", 3, 3),
        ("optimizer", 2, 2),
        ("ema", 1, 1),
    }
    assert remarks == []


def test_one_bit_is_found_and_named(written):
    def flip(parts):
        weight = parts["model"]["blocks.0.weight"]
        weight.view(torch.int32)[3, 2] ^= 1

    a, b = written("a"), written("b", change=flip)
    results, _ = compare_runs(a, b)
    model = next(result for result in results if result.part == "model")
    assert (model.equal, model.worst_name, model.ok) == (2, "model.blocks.0.weight", False)
    assert 0 < model.worst < 1e-6
    assert all(result.ok for result in results if result.part != "model")
    assert f"model              3          2  {model.worst:.3g} in model.blocks.0.weight" in render(
        results, []
    )


def test_a_zero_of_another_sign_is_a_difference(written):
    def zero(sign):
        def change(parts):
            parts["model"]["blocks.0.bias"] = torch.full((1,), sign)

        return change

    results, _ = compare_runs(written("a", change=zero(0.0)), written("b", change=zero(-0.0)))
    assert [result.part for result in results if not result.ok] == ["model"]


def test_the_worst_difference_is_the_one_that_is_named(written):
    def spoil(parts):
        parts["model"]["blocks.0.bias"] += 1e-3
        parts["model"]["blocks.0.weight"] += 1.0

    results, _ = compare_runs(written("a"), written("b", change=spoil))
    model = next(result for result in results if result.part == "model")
    assert model.worst_name == "model.blocks.0.weight" and model.worst == pytest.approx(1.0)


def test_facts_and_logged_losses_are_compared(written):
    a = written("a", facts={"seed": 1, "samples": 16}, losses=(1.0, 0.5, 0.25))
    b = written("b", facts={"seed": 1, "samples": 8}, losses=(1.0, 0.5, 0.26))
    assert compare_runs(a, b)[1] == [
        "the fact 'samples' is 16 without and 8 with the resume",
        "loss differs from step 3 on",
    ]
    shorter = written("c", facts={"seed": 1, "samples": 16}, losses=(1.0, 0.5))
    assert "loss differs from step 3 on" in compare_runs(a, shorter)[1]


def test_checkpoints_of_other_tensors_are_not_compared(written):
    def lose(parts):
        del parts["model"]["head"]

    checkpoints = [run / "checkpoints/step_00000002" for run in (written("a"), written("b", change=lose))]
    with pytest.raises(MMError, match=r"only one of the checkpoints contains model\.head"):
        compare_checkpoints(*checkpoints)


FORGETFUL = """
from mm_core import Component, hookimpl
from mm_custom_dit.config import CustomDiTConfig

@hookimpl
def mm_predictors():
    config = "mm_custom_dit.config:CustomDiTConfig"
    return [Component(name="forgetful", target="forgetful:build", config=config)]

def build(**fields):
    import torch
    from mm_custom_dit.model import CustomDiT

    class Forgetful(CustomDiT):
        calls = 0

        def forward(self, latents, timestep, text, text_mask):
            self.calls += 1  # no checkpoint holds it
            return super().forward(latents, timestep, text * (1.0 + 0.1 * self.calls), text_mask)

    return Forgetful(**fields)
"""


@pytest.mark.slow
def test_a_model_with_a_memory_of_its_own_is_found_out(tiny, tmp_path, mm):
    plugin = tmp_path / "forgetful.py"
    plugin.write_text(FORGETFUL)
    fields = (
        "num_layers: 2, num_heads: 2, head_dim: 12, patch_size: [2, 2, 2], in_channels: 12, out_channels: 12,"
        " text_dim: 32, freq_dim: 32, ffn_dim: 48, rope_max_seq_len: 64"
    )
    overrides = (f"plugins.path=[{plugin}]", f"task.predictor={{type: local/forgetful, {fields}}}")
    done = mm("train", "--config", tiny, "--verify-resume", 2, "data.loader.workers=0", *overrides)
    assert done.code == 1, done.err
    assert (
        "the resumed run DIFFERS from the uninterrupted run" in done.out
        and "loss differs from step 3 on" in done.out
    )
    assert " in model.predictor." in done.out


@pytest.mark.slow
def test_a_run_that_is_too_short_or_fails_is_a_readable_error(tiny, mm):
    done = mm("train", "--config", tiny, "--verify-resume", 7, "data.loader.workers=0")
    assert done.code == 1
    assert done.err == (
        "mm: error: --verify-resume: 7 + 7 steps are more than the run has: 12 steps\n  accepted: 1 to 6\n"
    )
    done = mm("train", "--config", tiny, "--verify-resume", 1, "data.train.annotations=nowhere.json")
    assert done.code == 1 and "the uninterrupted run failed with exit code 1" in done.err
    assert "nowhere.json: the annotation file does not exist" in done.err


@pytest.mark.slow
def test_under_a_launcher_it_is_refused(tiny, mm):
    done = mm("train", "--config", tiny, "--verify-resume", 1, RANK="0", WORLD_SIZE="1")
    assert (
        done.code == 1 and "--verify-resume cannot be used here: this process is already rank 0" in done.err
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            "--verify-resume 2 --stop-after 1 --resume never --dry-run",
            "--dry-run, --resume, --stop-after cannot be used with --verify-resume, which trains from scratch"
            " in a temporary folder and stops by itself",
        ),
        (
            "--verify-resume 2 --allow train",
            "--allow cannot be used with --verify-resume, which trains",
        ),
        ("--resume never --allow all", "--allow cannot be used with --resume never: --allow accepts"),
        ("--json", "--json works only with --dry-run"),
    ],
)
def test_options_that_contradict_each_other_are_one_error(options, sentence, tmp_path, capsys):
    path = tmp_path / "absent.yaml"
    assert main(["train", "--config", str(path), *options.split()]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"mm: error: command line: {sentence}") and not said.out
    assert said.err.count("mm: error:") == 1
