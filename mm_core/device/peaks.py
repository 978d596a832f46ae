"""Published peak performance of accelerators."""

from __future__ import annotations

import torch

from mm_core.device.kind import device_type

_PEAKS: tuple[tuple[str, float], ...] = (
    ("GB300", 2500e12),  # nvidia.com/en-us/data-center/gb300-nvl72: 360 PF sparse over 72, halved
    ("GB200", 2500e12),  # nvidia.com/en-us/data-center/gb200-nvl72: 360 PF sparse over 72, halved
    ("B300", 2250e12),  # nvidia.com/en-us/data-center/hgx: 36 PF sparse over 8, halved
    ("B200", 2250e12),  # nvidia.com/en-us/data-center/hgx: 36 PF sparse over 8, halved
    ("H200 NVL", 835.5e12),  # nvidia.com/en-us/data-center/h200: 1,671 sparse, halved
    ("H200", 989.4e12),  # nvidia.com/en-us/data-center/h200: 1,979 sparse, halved
    ("H100 NVL", 835.5e12),  # nvidia.com/en-us/data-center/h100: 1,671 sparse, halved
    ("H100 PCIe", 756.4e12),  # NVIDIA H100 Tensor Core GPU Architecture (whitepaper), table 2: PCIe
    ("H100", 989.4e12),  # the same table: SXM5
    ("H800 PCIe", 756.4e12),  # as the H100's: the H800 differs in its links and fp64
    ("H800", 989.4e12),
    ("H20", 148e12),  # NVIDIA H20 datasheet
    ("A100", 312e12),  # nvidia.com/en-us/data-center/a100
    ("A800", 312e12),  # as the A100's: the A800 differs in its links
    ("L40S", 362.05e12),  # nvidia.com/en-us/data-center/l40s: 362.05, and 733 sparse
    ("RTX 4090", 165.2e12),  # NVIDIA Ada GPU Architecture (whitepaper), appendix A: fp32 accumulation
    ("RTX 3090", 71e12),  # NVIDIA Ampere GA102 GPU Architecture (whitepaper), appendix A: fp32 accumulation
    ("V100-PCIE", 112e12),  # NVIDIA V100 datasheet; of fp16: it has no bf16
    ("V100", 125e12),  # the same datasheet: SXM2
    ("Ascend910B4", 280e12),  # Huawei Atlas 300T A2, product page; of fp16, as below
    ("Ascend910B3", 313e12),  # Huawei Atlas 800T A2, product page
    ("Ascend910B", 354e12),  # github.com/volcengine/verl, flops_counter.py: 24 cores x 8192 x 1.8 GHz
)
"""Dense bf16 FLOPs per second, by a part of the device's name; the first match applies."""


def published_peak(name: str) -> float | None:
    """The published peak performance of a device by name, in dense bf16 FLOPs per second; None if unknown."""
    return next((peak for part, peak in _PEAKS if part in name), None)


def peak_flops() -> float | None:
    """The published peak performance of this device, in dense bf16 FLOPs per second; None if unknown."""
    kind = device_type()
    return None if kind == "cpu" else published_peak(str(torch.get_device_module(kind).get_device_name()))
