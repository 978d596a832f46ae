"""A plain loop of Diffusers, recorded by the file that `mm align recorder` prints, against our run."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml
from diffusers import WanTransformer3DModel

pytestmark = pytest.mark.slow

SIZES = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 12, "out_channels": 12}
SIZES |= {"text_dim": 32, "freq_dim": 32, "ffn_dim": 64, "num_layers": 3}
LOOP = """
import sys, torch
from diffusers import WanTransformer3DModel
from record import Recorder

model = WanTransformer3DModel.from_pretrained("wan").train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
recorder = Recorder("theirs", {"predictor": model}, weights=True)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    clean = torch.randn(2, 12, 2, 4, 4, generator=draw)
    noise, sigma = torch.randn(clean.shape, generator=draw), torch.rand(2, generator=draw)
    text, mix = torch.randn(2, 512, 32, generator=draw), sigma.view(-1, 1, 1, 1, 1)
    noisy, target = (1 - mix) * clean + mix * noise, noise - clean
    recorder.inputs(
        latents=noisy, timestep=1000 * sigma, text=text, target=target, factors=torch.ones(2)
    )
    predicted = model(noisy, 1000 * sigma, text, return_dict=False)[0]
    loss = torch.nn.functional.mse_loss(predicted, target)
    recorder.loss(loss)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    recorder.before_update(norm)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    recorder.after_update(optimizer)
    optimizer.zero_grad()
recorder.close()
"""


def test_a_plain_loop_of_diffusers_and_our_run_agree(tmp_path):
    def mm(*words):
        command = [sys.executable, "-m", "mm_core.cli.main", *map(str, words)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    WanTransformer3DModel(patch_size=(1, 2, 2), **SIZES).save_pretrained(tmp_path / "wan")
    (tmp_path / "record.py").write_text(mm("align", "recorder").stdout)
    assert len((tmp_path / "record.py").read_text().splitlines()) <= 200
    (tmp_path / "loop.py").write_text(LOOP)
    subprocess.run([sys.executable, "loop.py"], cwd=tmp_path, check=True)
    config = {
        "run": {"name": "ours"},
        "task": {
            "type": "text_to_video",
            "predictor": {"type": "wan/transformer", "from_pretrained": str(tmp_path / "wan")},
            "autoencoder": {"type": "pixel", "spatial": 2},
            "text_encoder": {"type": "bytes", "hidden_size": 32},
            "scheduler": {"type": "wan/flow_match"},
        },
        "data": {
            "train": {"type": "shapes", "num_frames": 2, "height": 8, "width": 8, "clips": 8},
            "loader": {"workers": 0},
        },
        "optimizer": {"type": "adamw", "lr": 1e-3, "weight_decay": 0.01},
        "train": {"steps": 3, "micro_batch_size": 2, "global_batch_size": 2, "clip_grad_norm": 1.0},
    }
    (tmp_path / "ours.yaml").write_text(yaml.safe_dump(config))
    command = (
        "align",
        "record",
        "--config",
        tmp_path / "ours.yaml",
        "--steps",
        3,
        "--like",
        tmp_path / "theirs",
    )
    assert (done := mm(*command, "--out", tmp_path / "ours")).returncode == 0, done.stderr
    assert "fed from" in done.stdout and "factors, given.latents, given.timestep, target, text" in done.stdout
    done = mm("align", "compare", tmp_path / "ours", tmp_path / "theirs", "--tolerance", 1e-6)
    assert done.returncode == 0 and " 0 different" in done.stdout, done.stdout
    done = mm(*command, "--out", tmp_path / "changed", "optimizer.weight_decay=0.0")
    done = mm("align", "compare", tmp_path / "changed", tmp_path / "theirs")
    assert (
        "the weight differs after the update, and its gradient agrees" in done.stdout and done.returncode == 1
    )
