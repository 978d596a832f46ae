"""The commands `mm import` and `mm export`."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from mm_core.checkpoint.reading import open_checkpoint
from mm_core.config.load import load_config
from mm_core.plan import build_task
from mm_core.training.verify_resume import _tensors

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tiny, tmp_path_factory):
    """Weights for the tiny run's predictor."""
    generator = torch.Generator().manual_seed(5)
    shapes = {k: t.shape for k, t in build_task(load_config(tiny)).predictor.state_dict().items()}
    folder = tmp_path_factory.mktemp("source")
    tensors = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_run_trains_on_from_what_was_imported(source, tiny, tmp_path, mm):
    """On two ranks, whose batch it could not be, without data at first; every bit as a run that begins with
    `init_from`."""
    common = [tiny, f"run.dir={tmp_path}", "lr_schedule={type: constant}", "ema={decay: 0.5}"]
    common += ["train.micro_batch_size=1", "train.global_batch_size=1"]
    absent = f"data.train.annotations={tmp_path}/absent.json"
    done = mm("import", "--from", source, "--config", *common, absent, "--nproc", 2)
    assert done.code == 0, done.err
    saved = tmp_path / "tiny/checkpoints/step_00000000"
    assert "69 tensors loaded (core/safetensors)" in done.err
    assert f"{saved}: `mm-train --config {tiny} run.dir={tmp_path}" in done.out
    out = tmp_path / "out"
    done = mm("export", "--run", tmp_path / "tiny", "--to", "safetensors", "--out", out, "--ema")
    assert done.code == 0, done.err
    given, taken = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert given.keys() == taken.keys() and all(torch.equal(given[name], taken[name]) for name in given)

    done = mm("train", "--config", *common, "train.steps=2")
    assert done.code == 0, done.err
    assert f"resumed {saved} at step 0 of 2" in done.err
    assert open_checkpoint(tmp_path / "tiny").facts["imported"] == open_checkpoint(saved).facts["imported"]
    line = next(line for line in done.err.splitlines() if " data.train " in line)
    assert line.split("  ")[-1] == "the checkpoint was made without data" and " safe " in line
    done = mm(
        "train", "--config", *common, "train.steps=2", "run.name=other", f"init_from={{path: {source}}}"
    )
    assert done.code == 0, done.err
    ours = dict(_tensors(tmp_path / "tiny/checkpoints/step_00000002"))
    theirs = dict(_tensors(tmp_path / "other/checkpoints/step_00000002"))
    assert ours.keys() == theirs.keys() and any(name.startswith("optimizer.") for name in ours)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())

    done = mm("export", "--run", f"{tmp_path}/tiny@2", "--to", "wan_transformer", "--max-shard", "60kB")
    assert done.code == 0, done.err
    place = tmp_path / "tiny/exports/step_00000002-wan_transformer"
    *files, last = done.out.splitlines()
    assert sorted(line.split()[-1] for line in files) == sorted(path.name for path in place.iterdir())
    assert last.endswith(f"in {place}")
    assert "| steps | 2 |" in (place / "README.md").read_text()


def test_what_cannot_be_is_one_error(source, tiny, tmp_path, mm):
    run = f"run.dir={tmp_path}"
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-10])
    done = mm("import", "--from", cut, "--config", tiny, run, "--nproc", 2)
    assert done.code == 1 and done.err.count("error:") == 1
    assert "not a complete safetensors file: it is truncated" in done.err and "Traceback" not in done.err
    done = mm("import", "--from", source, "--config", tiny, run, "task.predictor.ffn_dim=64")
    assert done.code == 1 and "misshapen: predictor.blocks.0.ffn" in done.err
    done = mm("import", "--from", tmp_path / "none", "--config", tiny, run)
    assert done.code == 1 and f"{tmp_path}/none: there is no such file or folder" in done.err
    done = mm("export", "--run", tmp_path / "tiny", "--to", "safetensors")
    assert done.code == 1 and f"{tmp_path}/tiny: there is no such run" in done.err
    assert {path.name for path in tmp_path.iterdir()} == {"cut"}


def test_names_that_would_command_a_terminal_are_spelt_out(tmp_path, tiny, mm):
    file = tmp_path / "x.safetensors"
    save_file({"\x1b[31mred\n": torch.zeros(2)}, file)
    save_file({"a": torch.zeros(2)}, tmp_path / "y.safetensors")
    shown, differs = mm("weights", "show", file), mm("weights", "diff", file, tmp_path / "y.safetensors")
    assert shown.out.startswith("\\x1b[31mred\\n  ")
    assert "only in A: \\x1b[31mred\\n\n" in differs.out
    done = mm("import", "--from", file, "--config", tiny, f"run.dir={tmp_path}")
    assert done.code == 1 and "\\x1b[31mred" in done.err and "\x1b" not in done.err
