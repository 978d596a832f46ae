"""Runs with adapters: checkpoints store trained weights; the others are read from their original files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from mm_custom_dit.model import CustomDiT
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.device.torch_private import shards_mixed
from mm_core.loading.checkpoint_source import CheckpointSource
from mm_core.modules.adapter_layers import adapter_of
from support.logs import log_of

pytestmark = pytest.mark.slow

SIZES = {"num_layers": 2, "num_heads": 4, "head_dim": 24, "in_channels": 12, "out_channels": 12}
SIZES |= {"text_dim": 32, "freq_dim": 32, "ffn_dim": 1536, "patch_size": (2, 2, 2), "rope_max_seq_len": 64}


KINDS = [("alone", "wan_transformer"), ("merged", "safetensors", "--merge-lora")]
KINDS += [("average", "safetensors", "--merge-lora", "--ema")]


def model(seed: int) -> CustomDiT:
    """With a head that is not zero, so that adapters have gradients from the first step."""
    torch.manual_seed(seed)
    made = CustomDiT(**SIZES)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.05)
    return made


@pytest.fixture
def base(tmp_path) -> Path:
    path = tmp_path / "base.safetensors"
    save_file({f"predictor.{name}": tensor for name, tensor in model(0).state_dict().items()}, path)
    return path


@pytest.fixture
def style(tmp_path) -> Path:
    """An adapter as PEFT saves it, its ranks by a pattern."""
    settings = LoraConfig(r=2, lora_alpha=6, target_modules=["to_q", "to_k"], rank_pattern={"to_k": 1})
    get_peft_model(model(1), settings).save_pretrained(tmp_path / "style")
    return tmp_path / "style"


def arguments(tiny: Path, tmp_path: Path, name: str, base: Path, adapter: str, *more: str) -> list[object]:
    sizes = [f"task.predictor.{key}={list(v) if isinstance(v, tuple) else v}" for key, v in SIZES.items()]
    return [
        "train", "--config", tiny, *sizes, f"run.name={name}", f"run.dir={tmp_path}",
        f"init_from.path={base}", f"train.adapters=[{adapter}]",
        "train.steps=4", "lr_schedule={type: constant}", "checkpoint={every: 2, keep: 9}", *more,
    ]  # fmt: skip


def checkpoint(run: Path, step: int = 4) -> Path:
    return run / f"checkpoints/step_{step:08d}"


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def test_a_checkpoint_is_what_is_trained_and_is_resumed_sampled_and_exported(
    tiny, base, style, tmp_path, mm, same_clips
):
    """Like a full checkpoint, bit for bit, also on other ranks, after the adapter's file is gone."""
    adapter = f"{{from: {style}}}"
    runs = {
        name: arguments(
            tiny, tmp_path, name, base, adapter, "ema={decay: 0.9}", f"checkpoint.frozen={frozen}"
        )
        for name, frozen in (("lean", "null"), ("full", "true"))
    }
    for command in runs.values():
        done = mm(*command, "--stop-after", 2)
        assert done.code == 75, done.err
    assert size(checkpoint(tmp_path / "lean", 2)) < 0.1 * size(checkpoint(tmp_path / "full", 2))
    held, everything = (OpenedCheckpoint(checkpoint(tmp_path / name, 2)).names("model") for name in runs)
    assert held == {name for name in everything if adapter_of(name)}
    (row,) = json.loads((checkpoint(tmp_path / "lean", 2) / "manifest.json").read_text())["base"]
    assert row["key"] == "init_from" and row["path"] == str(base) and row["tensors"] == len(load_file(base))
    shutil.rmtree(style)
    for name, command in runs.items():
        assert mm(*command, "--dry-run").code == 0
        done = mm(*command, "--nproc", 2)
        assert done.code == 0, done.err
        for kind, layout, *options in KINDS:
            out = ("--out", tmp_path / f"{name}-{kind}", "--to", layout)
            done = mm("export", "--run", tmp_path / name, *out, *options)
            assert done.code == 0, done.err
    for kind, *_ in KINDS:
        lean, full = (weights(tmp_path / f"{name}-{kind}") for name in runs)
        assert lean.keys() == full.keys()
        assert all(torch.equal(tensor, full[name]) for name, tensor in lean.items())
    clips = []
    for name in runs:
        out = tmp_path / f"{name}-clips"
        done = mm("sample", "--run", tmp_path / name, "--prompt", "a circle", "--steps", 2, "--out", out)
        assert done.code == 0, done.err
        clips.append(out)
    assert same_clips(*clips)


LORA = "{targets: [to_q], rank: 1}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_dora_upon_weights_that_are_not_held_resumes_bit_for_bit(ranks, tiny, base, tmp_path, mm):
    """Its head is not zero, so every adapter tensor has a gradient from the first step on."""
    dora = "{targets: [to_q, ffn], rank: 2, dora: true, dropout: 0.2}"
    command = arguments(tiny, tmp_path, "dora", base, dora, "train.also_train=[predictor.proj_out]")
    done = mm(*command, "--nproc", ranks, "--verify-resume", 2)
    assert done.code == 0, done.out + done.err
    rows = {line.split()[0]: line.split()[1:3] for line in done.out.splitlines()[1:3]}
    assert rows["model"] == ["26", "26"] and rows["optimizer"] == ["78", "78"], done.out


def test_a_base_that_has_gone_moved_or_changed_is_one_error(tiny, base, tmp_path, mm):
    def command(path: Path) -> list[object]:
        return arguments(tiny, tmp_path, "tuned", path, LORA)

    assert mm(*command(base), "--stop-after", 2).code == 75
    saved = checkpoint(tmp_path / "tuned", 2)
    moved = base.with_name("moved.safetensors")
    base.rename(moved)
    sample = ("sample", "--run", tmp_path / "tuned", "--prompt", "a", "--steps", 1, "--out", tmp_path / "c")
    for done in (mm(*command(base)), mm(*sample)):
        assert done.code == 1
        assert done.err == (
            f"mm: error: {saved}: this checkpoint does not contain 69 frozen weights, and their files cannot"
            f" be used: {base}: there is no such file or folder\n"
            "  accepted: the files that the run started from\n"
            "  hint: put the files back, or set init_from to their new place; to store such weights in"
            " checkpoints, train with checkpoint.frozen: true\n"
        )
    done = mm("weights", "show", tmp_path / "tuned")
    assert f"missing: 69 frozen tensors of init_from, read from {base}\n" in done.out
    # An export of the adapter does not need the base weights.
    out = ("--to", "wan_transformer", "--out", tmp_path / "alone")
    assert mm("export", "--run", tmp_path / "tuned", *out).code == 0
    out = ("--to", "safetensors", "--merge-lora", "--out", tmp_path / "merged")
    done = mm("export", "--run", tmp_path / "tuned", *out, f"init_from.path={moved}")
    assert (
        done.code == 0
        and load_file(tmp_path / "merged/model.safetensors").keys() == model(0).state_dict().keys()
    )
    done = mm(*sample, f"init_from.path={moved}")
    assert done.code == 0 and (tmp_path / "c/contact_sheet.png").is_file(), done.err
    done = mm(*command(moved), "--stop-after", 3)
    assert done.code == 75 and f"{moved}: 69 frozen tensors loaded" in done.out + done.err, done.err
    (row,) = json.loads((checkpoint(tmp_path / "tuned", 3) / "manifest.json").read_text())["base"]
    assert row["path"] == str(moved)
    other = {f"predictor.{name}": tensor for name, tensor in model(0).state_dict().items()}
    other["predictor.blocks.1.ffn.net.2.bias"][-1] += 1
    save_file(other, moved)
    done = mm(*command(moved))
    assert done.code == 1 and f"{moved}: its weights have changed since" in done.err


def test_a_place_that_the_environment_names_is_not_written_down(tiny, base, tmp_path, mm):
    command = arguments(tiny, tmp_path, "tuned", Path("${oc.env:BASE}"), LORA)
    assert mm(*command, "--stop-after", 1, BASE=str(base)).code == 75
    saved = checkpoint(tmp_path / "tuned", 1)
    assert str(base) not in (saved / "manifest.json").read_text() + (saved / "config.yaml").read_text()
    done = mm(*command, BASE=str(base.rename(base.with_name("moved.safetensors"))))
    assert done.code == 0 and "moved.safetensors: 69 frozen tensors loaded" in done.out + done.err, done.err


def test_what_is_held_from_then_on_and_what_an_older_checkpoint_holds(tiny, base, tmp_path, mm):
    """checkpoint.frozen: true at a resume makes a run permanently independent of its base."""
    command = arguments(tiny, tmp_path, "tuned", base, LORA)
    assert mm(*command, "--stop-after", 1).code == 75
    assert mm(*command, "checkpoint.frozen=true", "--stop-after", 2).code == 75
    base.unlink()
    done = mm(*command, "init_from=null")
    assert done.code == 0, done.err
    names = [OpenedCheckpoint(checkpoint(tmp_path / "tuned", step)).names("model") for step in (1, 2, 4)]
    assert len(names[0]) == 8 and len(names[1]) == 77 and names[1] == names[2]


def test_a_run_begins_with_one_that_holds_adapters_alone(tiny, base, tmp_path, mm):
    """Adapters from the run, and base weights from the files that it read."""
    assert mm(*arguments(tiny, tmp_path, "first", base, LORA)).code == 0
    second = arguments(tiny, tmp_path, "second", tmp_path / "first", LORA, "train.steps=0")
    assert mm(*second, "train.steps=1", "optimizer.lr=0.0").code == 0
    for name in ("first", "second"):
        out = ("--out", tmp_path / f"{name}-out", "--to", "safetensors", "--merge-lora")
        done = mm("export", "--run", tmp_path / name, *out)
        assert done.code == 0, done.err
    one, two = (weights(tmp_path / f"{name}-out") for name in ("first", "second"))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    (row,) = json.loads((checkpoint(tmp_path / "second", 1) / "manifest.json").read_text())["base"]
    assert row["path"] == str(checkpoint(tmp_path / "first"))


def test_an_import_holds_what_it_copies_unless_an_option_forbids_it(tiny, base, tmp_path, mm):
    for name, frozen, count in (("whole", "null", 77), ("lean", "false", 8)):
        command = arguments(tiny, tmp_path, name, Path("unused"), LORA, f"checkpoint.frozen={frozen}")
        done = mm("import", "--from", base, *command[1:])
        assert done.code == 0, done.err
        assert len(OpenedCheckpoint(checkpoint(tmp_path / name, 0)).names("model")) == count
        assert mm(*command, "train.steps=1", "--allow", "data").code == 0
        assert len(OpenedCheckpoint(checkpoint(tmp_path / name, 1)).names("model")) == count


@pytest.mark.skipif(not shards_mixed(), reason="this torch shards no module of mixed dtypes")
def test_a_base_in_bf16_trains_as_one_in_fp32_that_is_computed_in_bf16(tiny, base, tmp_path, mm, same_clips):
    """Its values are bf16 numbers: trained weights and samples do not differ by a bit."""
    stored = {name: tensor.bfloat16() for name, tensor in load_file(base).items()}
    save_file(stored, base)
    clips, tuned, losses = [], [], []
    for name, options in (("wide", ()), ("narrow", ("train.base_dtype=bf16",))):
        adapter = "{targets: [to_q, ffn], rank: 2, dora: true}"
        command = arguments(tiny, tmp_path, name, base, adapter, "engine.param_dtype=bf16", *options)
        done = mm(*command, "--nproc", 2, "checkpoint.frozen=true")
        assert done.code == 0, done.err
        rows = log_of(tmp_path / name)
        losses.append([row["loss"] for row in rows if "loss" in row])
        out = tmp_path / f"{name}-clips"
        done = mm("sample", "--run", tmp_path / name, "--prompt", "a circle", "--steps", 2, "--out", out)
        assert done.code == 0, done.err
        clips.append(out)
        source = CheckpointSource(tmp_path / name, "model")
        kinds = {str(kind) for path, kind in source.dtypes.items() if not adapter_of(path)}
        assert kinds == {"torch.bfloat16" if options else "torch.float32"}
        state = {path: torch.empty(shape) for path, shape in source.shapes.items()}
        source.fill(state)
        tuned.append(state)
    assert losses[0] == losses[1] and same_clips(*clips)
    assert all(torch.equal(tensor, tuned[1][name]) for name, tensor in tuned[0].items())
