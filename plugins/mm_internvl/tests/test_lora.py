"""A LoRA of InternVL from two ranks to where others load it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from mm_internvl.testing import TOKENS, make_tiny_checkpoint, make_tiny_conversations
from mm_internvl.tiny_original import as_original
from peft import PeftModel
from safetensors.torch import load_file
from transformers import InternVLForConditionalGeneration

import mm_core
from mm_core.config.load import load_config
from mm_core.interchange.export import export
from support import warm
from support.logs import losses

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs/internvl/tiny_lora.yaml"
FEWER = ["train.steps=4", "checkpoint.every=4", "data.loader.workers=0", "lr_schedule.warmup_steps=0"]


def logits(model) -> torch.Tensor:
    image = model.config.image_token_id
    ids = torch.tensor([[5, 6, *[image] * TOKENS, 9, 10, 11]])
    pixels = torch.randn(1, 3, 56, 56, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(input_ids=ids, pixel_values=pixels, attention_mask=torch.ones_like(ids)).logits


@pytest.mark.slow
def test_two_ranks_train_a_lora_that_peft_loads_and_that_merges_into_either_layout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_tiny_conversations("data/digits")
    origin = make_tiny_checkpoint("ckpt/internvl_tiny")
    command = ["train", "--config", CONFIG, "--nproc", 2, *FEWER]
    done = warm.mm(*command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    mm_core.train(load_config(CONFIG, [*FEWER, "run.name=alone"]))
    assert losses(Path("runs/internvl_tiny_lora")) == pytest.approx(losses(Path("runs/alone")), rel=1e-5)

    run = "runs/internvl_tiny_lora"
    out = export(run, tmp_path / "out", "transformers")
    merged = export(run, tmp_path / "merged", "transformers", merge_adapters=True)
    original = export(run, tmp_path / "original", "internvl/original", merge_adapters=True)
    base = InternVLForConditionalGeneration.from_pretrained(origin)
    plain = logits(base)
    expected = logits(InternVLForConditionalGeneration.from_pretrained(merged))
    assert (expected - plain).abs().max() > 1e-2
    adapted = PeftModel.from_pretrained(base, out)
    assert (logits(adapted) - expected).abs().max() < 1e-4
    turned = as_original(load_file(merged / "model.safetensors"))
    found = load_file(original / "model.safetensors")
    assert turned.keys() == found.keys() and all(torch.equal(turned[name], found[name]) for name in found)
