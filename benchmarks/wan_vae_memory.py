"""Measures memory for encoding a clip with Wan's VAE, above clip and latents: 81 frames against 17.

    python benchmarks/wan_vae_memory.py [--vae tiny|2.1|2.2] [--height 64] [--width 64] [--dtype fp32]

Needs mm-wan. Weights are random: `tiny` is the VAE of mm_wan.testing, `2.1` and `2.2` have the published
sizes (16 and 48 channels of latents; 0.5 and 2.8 GB). On a CPU, torch's profiler records every allocation;
on an accelerator, torch reports the peak. Tiny layers are the worst case: memory that grows with the clip
is a larger share of their total.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from mm_wan.encoders.vae import WanVAE
from mm_wan.testing import make_tiny_checkpoint
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import mm_core
from mm_core.device import device_type, peak_memory_bytes, reset_peak_memory, synchronize

BAR = 1.15
SHORT, LONG = 17, 81
PUBLISHED = {  # config.json of the VAEs of Wan-AI/Wan2.1-T2V-1.3B-Diffusers and Wan2.2-TI2V-5B-Diffusers
    "2.1": {},
    "2.2": {
        "base_dim": 160,
        "decoder_base_dim": 256,
        "z_dim": 48,
        "in_channels": 12,
        "out_channels": 12,
        "is_residual": True,
        "patch_size": 2,
        "scale_factor_spatial": 16,
        "latents_mean": [0.0] * 48,
        "latents_std": [1.0] * 48,
    },
}


def vae_at(folder: Path, kind: str, dtype: str) -> WanVAE:
    """Builds a Wan VAE with random weights on the device."""
    if kind == "tiny":
        folder = make_tiny_checkpoint(folder) / "vae"
    else:
        AutoencoderKLWan(**PUBLISHED[kind]).save_pretrained(folder)
    vae = WanVAE(from_pretrained=str(folder), dtype=dtype)
    mm_core.load_frozen(vae, device_type())
    return vae


def cpu_peak(vae: WanVAE, pixels: Tensor) -> int:
    """Peak memory of torch on the CPU in bytes while the VAE encodes, above pixels and moments."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = vae.encode(pixels).moments
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert peak > result.nbytes
    return peak - result.nbytes


def device_peak(vae: WanVAE, pixels: Tensor) -> int:
    """Peak memory on an accelerator in bytes while the VAE encodes, above pixels and moments."""
    synchronize()
    reset_peak_memory()
    before = peak_memory_bytes()
    result = vae.encode(pixels).moments
    synchronize()
    return peak_memory_bytes() - before - result.nbytes


def main() -> int:
    parser = argparse.ArgumentParser(description="memory for encoding, by the length of the clip")
    parser.add_argument("--vae", choices=["tiny", *PUBLISHED], default="tiny")
    parser.add_argument("--height", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    args = parser.parse_args()
    measure = cpu_peak if device_type() == "cpu" else device_peak
    with tempfile.TemporaryDirectory(prefix="wan_vae_memory-") as scratch:
        vae = vae_at(Path(scratch, "vae"), args.vae, args.dtype)
    peaks = {}
    print(f"{'frames':>6} {'above clip and latents':>24} {'seconds':>8}")
    for frames in (5, SHORT, LONG):  # the first is warm-up
        pixels = torch.rand(1, 3, frames, args.height, args.width, device=device_type()) * 2 - 1
        began = time.perf_counter()
        peaks[frames] = measure(vae, pixels)
        print(f"{frames:>6} {peaks[frames] / 2**20:>20,.1f} MiB {time.perf_counter() - began:>8.1f}")
    ratio = peaks[LONG] / peaks[SHORT]
    print(f"RESULT wan_vae_memory_81_over_17_frames {ratio:.3f} <={BAR} {'ok' if ratio <= BAR else 'short'}")
    return 0 if ratio <= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
