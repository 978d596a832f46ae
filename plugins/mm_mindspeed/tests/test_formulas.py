"""A migrated run against the formulas of its source: ten steps in plain PyTorch, from the same draws."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from folders import CLIPS, WAN, changed, write
from mm_mindspeed.weights import KEYS
from mm_wan.testing import make_tiny_checkpoint
from transformers import AutoTokenizer, UMT5EncoderModel

from mm_core.testing.data.video_readers import write_clip
from support import warm

pytestmark = pytest.mark.slow

FRAMES, HEIGHT, WIDTH = 5, 32, 48
RATE, INITIAL, LEAST, WARM, STEPS = 2e-3, 1e-4, 5e-5, 3, 10
CAPTIONS = ["a red circle moves left", "a green square moves up", "a blue circle moves down", "a cat"]
FLAGS = {
    "micro-batch-size": 2,
    "global-batch-size": 4,
    "train-iters": STEPS,
    "lr": RATE,
    "lr-decay-style": "cosine",
    "min-lr": LEAST,
    "lr-warmup-iters": WARM,
    "lr-warmup-init": INITIAL,
    "clip-grad": 0.5,
    "weight-decay": 0.02,
    "adam-beta1": 0.9,
    "adam-beta2": 0.95,
    "seed": 42,
    "num-workers": 0,
}


def source(folder: Path) -> tuple[Path, WanTransformer3DModel]:
    """A folder of MindSpeed-MM: its files, clips and weights as its converter writes them."""
    make_tiny_checkpoint(folder / "Wan")
    model = WanTransformer3DModel.from_pretrained(folder / "Wan/transformer")
    (folder / "theirs/release/mp_rank_00").mkdir(parents=True)
    (folder / "theirs/latest_checkpointed_iteration.txt").write_text("release")
    named = {str(KEYS.renamed(name)): tensor for name, tensor in model.state_dict().items()}
    torch.save({"model": named}, folder / "theirs/release/mp_rank_00/model_optim_rng.pt")
    (folder / "clips").mkdir()
    rows = []
    for number, caption in enumerate(CAPTIONS):
        draw = torch.Generator().manual_seed(number)
        coarse = torch.rand(1, 3, 2, 4, 6, generator=draw)
        smooth = torch.nn.functional.interpolate(coarse, (FRAMES, HEIGHT, WIDTH), mode="trilinear")
        write_clip(folder / f"clips/{number}.mp4", (smooth[0] * 255).byte().permute(1, 2, 3, 0), 16)
        size = {"height": HEIGHT, "width": WIDTH}
        row = {"path": f"{number}.mp4", "cap": caption, "num_frames": FRAMES, "fps": 16, "resolution": size}
        rows.append(row)
    (folder / "clips.json").write_text(json.dumps(rows))
    sizes = model.config
    predictor = {
        "hidden_size": sizes.num_attention_heads * sizes.attention_head_dim,
        "num_layers": sizes.num_layers,
        "num_heads": sizes.num_attention_heads,
        "ffn_dim": sizes.ffn_dim,
        "freq_dim": sizes.freq_dim,
        "text_dim": sizes.text_dim,
        "in_dim": sizes.in_channels,
        "out_dim": sizes.out_channels,
    }
    encoders = {"from_pretrained": str(folder / "Wan/text_encoder"), "dtype": "fp32"}
    changes = {f"predictor.{key}": value for key, value in predictor.items()}
    changes |= {"ae.from_pretrained": str(folder / "Wan/vae"), "ae.dtype": "fp32"}
    changes |= {f"text_encoder.{key}": value for key, value in encoders.items()}
    paths = {"data_path": str(folder / "clips.json"), "data_folder": str(folder / "clips")}
    sizes_of_clips = {"num_frames": FRAMES, "max_height": HEIGHT, "max_width": WIDTH, "train_fps": 16}
    data = changed(
        CLIPS,
        {
            "dataset_param.basic_parameters": paths,
            "dataset_param.preprocess_parameters": sizes_of_clips,
            "dataset_param.tokenizer_config.from_pretrained": str(folder / "Wan/tokenizer"),
        },
    )
    engine = {"sharding_size": "auto", "param_dtype": "fp32", "reduce_dtype": "fp32"}
    flags = {**FLAGS, "load": str(folder / "theirs")}
    return write(folder / "run", changed(WAN, changes), data, flags, engine), model


def levels(shift: float = 3.0, count: int = 1000) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Their noise levels, timesteps, and weights of the squared error."""
    sigmas = torch.linspace(1.0, 0.003 / 1.002, count)
    sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)
    bell = torch.exp(-2 * ((sigmas * count - count / 2) / count) ** 2)
    bell = bell - bell.min()
    return sigmas, sigmas * count, bell * (count / bell.sum())


def rate(step: int) -> float:
    """Megatron's learning rate of a step."""
    if step <= WARM:
        return INITIAL + (RATE - INITIAL) * step / WARM
    return LEAST + (RATE - LEAST) * 0.5 * (math.cos(math.pi * (step - WARM) / (STEPS - WARM)) + 1)


def states(folder: Path, caption: str) -> torch.Tensor:
    """What their text encoder hands to the model for a caption: zeros behind its tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "Wan/tokenizer")
    encoder = UMT5EncoderModel.from_pretrained(folder / "Wan/text_encoder").eval()
    read = tokenizer(caption, return_tensors="pt", max_length=512, truncation=True)
    found = torch.zeros(512, encoder.config.d_model)
    with torch.no_grad():
        found[: read.input_ids.shape[1]] = encoder(**read).last_hidden_state[0]
    return found


def test_ten_steps_are_those_of_its_formulas(tmp_path):
    folder, model = source(tmp_path)
    done = warm.mm("migrate", folder, "--out", tmp_path / "run.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    words = ["--config", tmp_path / "run.yaml", "--steps", str(STEPS), "--out", tmp_path / "ours"]
    done = warm.mm("align", "record", *words, f"run.dir={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    ours = torch.tensor(losses(tmp_path / "ours"))
    assert len(ours) == 2 * STEPS

    sigmas, timesteps, weights = levels()
    captions = {caption: states(tmp_path, caption) for caption in ["", *CAPTIONS]}
    optimizer = torch.optim.AdamW(model.train().parameters(), betas=(0.9, 0.95), weight_decay=0.02)
    found, dropped = [], 0
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        for micro in range(2):
            given = torch.load(tmp_path / f"ours/inputs_{step}_{micro}.pt")
            assert given["given.timestep"].unique().numel() == 1, "one timestep a micro-batch"
            level = int((timesteps - given["given.timestep"].flatten()[0]).abs().argmin())
            clean = given["given.latents"] - sigmas[level] * given["target"]
            noise = clean + given["target"]
            for text in given["text"]:
                near = {each: float((text - value).abs().max()) for each, value in captions.items()}
                assert min(near.values()) < 1e-5
                dropped += min(near, key=lambda each: near[each]) == ""
            noisy = (1 - sigmas[level]) * clean + sigmas[level] * noise
            predicted = model(noisy, timesteps[level].expand(2), given["text"], return_dict=False)[0]
            loss = torch.nn.functional.mse_loss(predicted, noise - clean) * weights[level] / 2
            found.append(loss.item())
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert 0 < dropped <= 12, "a tenth of 40 captions"
    torch.testing.assert_close(ours, torch.tensor(found), rtol=1e-5, atol=1e-5)
    assert abs(found[0] - found[-1]) > 1e-2, "it trains"


def losses(record: Path) -> list[float]:
    rows = [json.loads(line) for line in (record / "rows_0.jsonl").read_text().splitlines()]
    return [row["mean"] for row in rows if row["kind"] == "loss"]
