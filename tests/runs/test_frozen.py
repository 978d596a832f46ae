"""Frozen encoders of real runs: wherever their weights lie, the run is the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5ForConditionalGeneration

from mm_core.cli.main import main
from support.checkpoints import tensors
from support.logs import log_of

WORDS = ("<pad>", "</s>", "<unk>", "a", "red", "green", "blue", "yellow", "circle", "square", "moves", "left")
UMT5 = {"vocab_size": len(WORDS), "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4}


@pytest.fixture(scope="module")
def umt5(tmp_path_factory) -> Path:
    """The folder of an encoder-decoder, of which the encoder is used, with its tokenizer."""
    folder = tmp_path_factory.mktemp("umt5")
    torch.manual_seed(0)
    UMT5ForConditionalGeneration(UMT5Config(**UMT5, num_layers=2, num_decoder_layers=1)).save_pretrained(
        folder
    )
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def config(tiny, shapes, umt5, tmp_path_factory) -> Path:
    """The tiny run with that encoder; three rows are held out and three clips are sampled, so that two ranks
    have unequally many."""
    document = yaml.safe_load(tiny.read_text())
    document["task"]["text_encoder"] = {"type": "hf_text", "from_pretrained": str(umt5), "dtype": "fp32"}
    document["data"]["validation"] = document["data"]["train"]
    document["validation"] = {
        "every": 2,
        "rows": 3,
        "samples": {
            "prompts": ["a red circle", "a blue square moves left", "up"],
            "steps": 2,
            "guidance": 2.0,
        },
    }
    document["train"]["steps"] = 4
    document["checkpoint"]["every"] = 2
    path = tmp_path_factory.mktemp("configs") / "frozen.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def figures(run: Path) -> list[dict[str, float]]:
    """What was logged, but for times."""
    rows = log_of(run)
    wanted = ("step", "loss", "grad_norm", "validation/loss", "validation/rows")
    return [{name: row[name] for name in wanted if name in row} for row in rows]


CLIPS = "samples/step_00000004"


@pytest.mark.slow
def test_runs_resumes_and_clips_are_the_same_wherever_the_encoder_lies(config, tmp_path, mm, same_clips):
    runs = {}
    for placement in ("replicated", "sharded", "offloaded"):
        common = ("train", "--config", config, f"run.dir={tmp_path}", f"run.name={placement}", "--nproc", 2)
        done = mm(*common, f"engine.frozen.text_encoder={placement}")
        assert done.code == 0, done.err
        runs[placement] = tmp_path / placement
    whole = runs["replicated"]
    last, expected = "checkpoints/step_00000004", tensors(whole / "checkpoints/step_00000004")
    assert figures(whole)[-1]["validation/rows"] == 3 and len([*(whole / CLIPS).glob("*.mp4")]) == 3
    for placement in ("sharded", "offloaded"):
        run = runs[placement]
        assert figures(run) == figures(whole) and same_clips(run / CLIPS, whole / CLIPS)
        found = tensors(run / last)
        assert found.keys() == expected.keys() and not any("text_encoder" in name for name in found)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    done = mm(
        "sample",
        "--run",
        run,
        "--prompt",
        "a red circle",
        "--steps",
        2,
        "--guidance",
        2,
        "--out",
        tmp_path / "one",
    )
    assert done.code == 0, done.err  # offloaded here too
    for path in sorted((whole / CLIPS).glob("*.mp4"))[1:]:
        path.unlink()
    assert same_clips(tmp_path / "one", whole / CLIPS)
    resumed(runs["sharded"], config, mm)
    assert figures(runs["sharded"]) == figures(whole)
    found = tensors(runs["sharded"] / last)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def resumed(run: Path, config: Path, mm) -> None:
    """Steps 3 and 4 once more."""
    for path in sorted((run / "checkpoints/step_00000004").iterdir()):
        path.unlink()
    (run / "checkpoints/step_00000004").rmdir()
    (run / "checkpoints/LATEST").write_text("step_00000002\n")
    done = mm(
        "train", "--config", config, f"run.dir={run.parent}", f"run.name={run.name}", "--nproc", 2,
        "engine.frozen.text_encoder=sharded",
    )  # fmt: skip
    assert done.code == 0 and "at step 2 of 4" in done.err, done.err


# -- before anything is trained ------------------------------------------------------------------


def planned(config: Path, capsys, *overrides: str) -> str:
    code = main(["train", "--config", str(config), "--dry-run", "--nproc", "2", *overrides])
    told = capsys.readouterr()
    assert code == 0, told.err
    return told.out


def counted(plan: str) -> int:
    """Bytes that the plan counts for the encoder on a rank's device."""
    return int(re.search(r"^  text_encoder +([\d,]+) bytes", plan, re.M)[1].replace(",", ""))


def test_a_dry_run_counts_the_encoder_where_it_lies(config, umt5, capsys):
    stored = load_file(umt5 / "model.safetensors")
    held = [t for name, t in stored.items() if name.startswith(("encoder.", "shared."))]
    bytes_held = sum(tensor.nbytes for tensor in held)
    whole = planned(config, capsys)
    assert counted(whole) == bytes_held and "not counted: autoencoder" in whole
    cut = planned(config, capsys, "engine.frozen={text_encoder: sharded}")
    assert "frozen            text_encoder sharded, 2 blocks one at a time" in cut
    assert counted(cut) == bytes_held / 2 and "more while it computes" in cut
    away = planned(config, capsys, "engine.frozen={text_encoder: offloaded}")
    assert counted(away) == 0
    assert f"text_encoder keeps {bytes_held / 2**20:.2f} MiB in host memory" in away


def test_a_dry_run_lists_what_frozen_and_trained_components_miss(config, umt5, tmp_path, capsys):
    text = planned(config, capsys, f"task.text_encoder.from_pretrained={tmp_path}/none")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert f"missing: {tmp_path}/none/{name} (needed to train)" in text
    assert "(size known once files are present)" in text and "not counted: autoencoder, text_encoder" in text


@pytest.mark.slow
def test_weights_that_do_not_fit_end_a_run_before_its_first_step(config, umt5, tmp_path, mm):
    """One error lists everything: a tensor that is missing, one too many, one of another shape."""
    broken = tmp_path / "umt5"
    broken.mkdir()
    for path in umt5.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    stored = load_file(broken / "model.safetensors")
    lost = "encoder.block.1.layer.1.DenseReluDense.wo.weight"
    stored["encoder.block.1.stray"] = stored.pop(lost)
    stored["encoder.final_layer_norm.weight"] = torch.ones(3)
    save_file(stored, broken / "model.safetensors", metadata={"format": "pt"})
    done = mm(
        "train", "--config", config, "--nproc", 2, f"run.dir={tmp_path}",
        f"task.text_encoder.from_pretrained={broken}", "engine.frozen.text_encoder=sharded",
    )  # fmt: skip
    assert done.code == 1
    assert f"1 missing: text_encoder.model.{lost}" in done.err
    assert "1 unexpected: encoder.block.1.stray" in done.err
    assert (
        "1 misshapen: text_encoder.model.encoder.final_layer_norm.weight (3 in the file, 32 in the task)"
        in (done.err)
    )
    assert not (tmp_path / "frozen" / "metrics.jsonl").exists()
