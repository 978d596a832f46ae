"""A migrated run of a tiny Wan trains as MindSpeed-MM's formulas do, written out in plain PyTorch."""

import json
import math
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from folders import CLIPS, WAN, changed, write
from mm_wan.schedulers.flow_match import WanFlowMatch
from mm_wan.testing import make_tiny_checkpoint

from mm_core.cli.main import main
from mm_core.config.load import load_config
from mm_core.tasks.text_to_video.task import TextToVideo
from mm_core.testing.data.video_readers import write_clip
from mm_core.training.run import train

STEPS, WARMUP, RATE, FLOOR, FIRST, DECAY = 10, 4, 2e-3, 2e-4, 5e-4, 0.1


def rate(step: int) -> float:
    """Megatron's schedule: the rate of a step from 0, with a linear warm-up and half a cosine."""
    if step <= WARMUP:
        return FIRST + (RATE - FIRST) * step / WARMUP
    share = (step - WARMUP) / (STEPS - WARMUP)
    return FLOOR + 0.5 * (math.cos(math.pi * share) + 1) * (RATE - FLOOR)


def levels() -> tuple[torch.Tensor, torch.Tensor]:
    """Timesteps and loss weights of their scheduler without any key: shift 3, sigma_min 0.003 / 1.002."""
    sigma = torch.linspace(1.0, 0.003 / 1.002, 1000)
    sigma = 3 * sigma / (1 + 2 * sigma)
    times = sigma * 1000
    bell = torch.exp(-2 * ((times - 500) / 1000) ** 2)
    bell = bell - bell.min()
    return times, bell * (1000 / bell.sum())


@pytest.mark.slow
def test_ten_steps_have_the_losses_of_the_formulas(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_tiny_checkpoint("Wan", "t2v")
    config_of_tiny = json.loads(Path("Wan/transformer/config.json").read_text())
    rows = [{"path": f"{i}.mp4", "cap": f"clip {i}"} for i in range(8)]
    write_small_clips(tmp_path / "clips", len(rows))
    Path("clips.json").write_text(json.dumps(rows))
    sizes = {
        "predictor.hidden_size": config_of_tiny["num_attention_heads"] * config_of_tiny["attention_head_dim"],
        "predictor.num_heads": config_of_tiny["num_attention_heads"],
        "predictor.num_layers": config_of_tiny["num_layers"],
        "predictor.ffn_dim": config_of_tiny["ffn_dim"],
        "predictor.text_dim": config_of_tiny["text_dim"],
        "predictor.freq_dim": config_of_tiny["freq_dim"],
        "text_encoder.dtype": "fp32",
    }
    process = "dataset_param.preprocess_parameters."
    data = {process + "num_frames": 5, process + "max_height": 32, process + "max_width": 32}
    flags = {
        "global-batch-size": 8,
        "micro-batch-size": 4,
        "lr": RATE,
        "min-lr": FLOOR,
        "lr-decay-style": "cosine",
        "lr-warmup-iters": WARMUP,
        "lr-warmup-init": FIRST,
        "weight-decay": DECAY,
        "clip-grad": 0.0,
        "train-iters": STEPS,
        "num-workers": 0,
        "load": "Wan/transformer/",
        "seed": 3,
    }
    write(tmp_path / "run", changed(WAN, sizes), changed(CLIPS, data), flags, {"reduce_dtype": "fp32"})
    assert main(["migrate", "run", "--out", "run.yaml"]) == 0
    config = load_config("run.yaml", ["data.loader.pin_memory=false"])
    assert (config.task.options["caption_dropout"], config.train.clip_grad_norm) == (0.1, None)

    seen = record(monkeypatch)
    result = train(config, resume="never", forecast=False)
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "loss" in line]
    assert len(trained) == STEPS and len(seen) == 2 * STEPS

    times, weights = levels()
    model = reference_model()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=DECAY
    )
    for step, line in enumerate(trained):
        optimizer.param_groups[0]["lr"] = rate(step)
        losses = []
        for latents, noise, timestep, text in seen[2 * step : 2 * step + 2]:
            index = int((times - timestep[0]).abs().argmin())
            assert torch.allclose(timestep, times[index].expand(4), atol=1e-3), (
                "one timestep for a micro-batch"
            )
            sigma = times[index] / 1000
            noisy = (1 - sigma) * latents + sigma * noise
            predicted = model(noisy, times[index].expand(4), text, return_dict=False)[0]
            loss = torch.nn.functional.mse_loss(predicted.float(), noise - latents) * weights[index]
            (loss / 2).backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        wanted = sum(losses) / 2
        assert line["loss"] == pytest.approx(wanted, rel=1e-5), step
        assert line["lr"] == pytest.approx(rate(step), rel=1e-6)


def write_small_clips(folder: Path, count: int) -> None:
    folder.mkdir()
    for number in range(count):
        draws = torch.Generator().manual_seed(number)
        frames = torch.randint(0, 256, (5, 32, 32, 3), generator=draws, dtype=torch.uint8)
        write_clip(folder / f"{number}.mp4", frames, 8)


def record(monkeypatch) -> list[tuple[torch.Tensor, ...]]:
    """What every forward of the training is made of: latents, noise, timesteps, states of the captions."""
    seen, parts = [], []
    add_noise, draw = WanFlowMatch.add_noise, TextToVideo.draw

    def noisy(self, latents, noise, timestep):
        parts.append((latents.clone(), noise.clone(), timestep.clone()))
        return add_noise(self, latents, noise, timestep)

    def drawn(self, clips, rng):
        parts.clear()
        inputs = draw(self, clips, rng)
        seen.append((*parts[0], inputs.text.clone()))
        return inputs

    monkeypatch.setattr(WanFlowMatch, "add_noise", noisy)
    monkeypatch.setattr(TextToVideo, "draw", drawn)
    return seen


def reference_model() -> torch.nn.Module:
    return WanTransformer3DModel.from_pretrained("Wan/transformer", torch_dtype=torch.float32).train()
