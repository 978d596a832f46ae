"""`mm doctor --deep`: a matrix product, two ranks that add up a tensor, and a file written and read."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from mm_core.cli.installation.checks import Report
from mm_core.device import current_device, device_count, device_stack
from mm_core.errors import MMError, first_line, plain_reason
from mm_core.runtime.launch.launcher import COMMAND, launch
from mm_core.runtime.launch.meeting import Nodes
from mm_core.runtime.launch.rank_process import run_as_rank
from mm_core.runtime.process_group import process_group
from mm_core.runtime.ranks import sum_over_ranks

_LARGEST = {torch.float32: 2e-3, torch.bfloat16: 2e-2}
"""Dtype -> the relative L2 difference to the product in float64 that its kernels keep to, TF32 included."""


def check_deep(report: Report, runs: Path, limit: float = 120.0) -> None:
    """Computes, communicates and stores something.

    Args:
        report: receives the findings.
        runs: folder that runs are written to; it need not exist.
        limit: seconds that the two ranks may take.
    """
    devices = 0
    try:
        report.facts["computes on"] = ", ".join(device_stack().values())
        devices = device_count()
        for dtype in _LARGEST:
            _check_product(report, dtype)
    except (MMError, RuntimeError) as error:
        hint = error.hint if isinstance(error, MMError) else None
        what = f"the device does not compute: {first_line(error)}"
        report.error(True, what, hint or "update the device's driver")
    _check_ranks(report, limit, {"MM_DEVICE": "cpu"} if devices < 2 else {})
    _check_file(report, next(each for each in (runs.absolute(), *runs.absolute().parents) if each.is_dir()))


def _check_product(report: Report, dtype: torch.dtype) -> None:
    fixed = torch.Generator().manual_seed(0)
    left, right = (torch.randn(512, 512, generator=fixed).to(dtype) for _ in range(2))
    product = (left.to(current_device()) @ right.to(current_device())).cpu().double()
    exact = left.double() @ right.double()
    apart = float((product - exact).norm() / exact.norm())
    name = str(dtype).removeprefix("torch.")
    report.facts[f"matrix product, {name}"] = f"relative difference to float64 {apart:.1e}"
    what = f"a matrix product in {name} differs from float64 by {apart:.1e}"
    report.error(not apart <= _LARGEST[dtype], what, "update the device's driver, and test its memory")


def _check_ranks(report: Report, limit: float, device: dict[str, str]) -> None:
    environ = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")} | device
    began, command = time.monotonic(), [*COMMAND, "doctor", "--two-ranks"]
    fix = "ping $(hostname) must answer: echo 127.0.0.1 $(hostname) >> /etc/hosts; no firewall on lo"
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        report.error(True, f"two ranks did not add up a tensor within {limit:.0f} s", fix)
        return
    if done.returncode == 0:
        report.facts["two ranks"] = f"add up a tensor ({time.monotonic() - began:.1f} s with their start)"
    line = [*done.stderr.strip().splitlines(), "without an error message"][0].removeprefix("mm: error: ")
    report.error(done.returncode, f"two ranks cannot add up a tensor: {line}", fix)


def two_ranks() -> int:
    """What `--two-ranks` does: starts two ranks, or is one of them; returns the exit code."""
    if "RANK" not in os.environ:
        return launch([*COMMAND, "doctor", "--two-ranks"], Nodes(2), announce=False)

    def work() -> int:
        with process_group() as ranks:
            tensor = torch.full((1000,), ranks.rank + 1.0, device=current_device())
            total = sum_over_ranks(tensor).cpu()
        if not bool((total == ranks.count * (ranks.count + 1) / 2).all()):
            raise MMError(f"the ranks' sum is {float(total[0]):g} in place of 3", hint="update the driver")
        return 0

    return run_as_rank(work)


def _check_file(report: Report, place: Path) -> None:
    tensor = torch.randn(4_000_000, generator=torch.Generator().manual_seed(0))
    fix = "run.dir=FOLDER elsewhere"
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix="mm_doctor_") as file:
            began = time.monotonic()
            torch.save(tensor, file)
            file.flush()
            os.fsync(file.fileno())
            taken = time.monotonic() - began
            same = torch.equal(torch.load(file.name, weights_only=True), tensor)
        report.facts["a saved file"] = f"{16 / taken:,.0f} MB/s at {place}"
        report.error(not same, f"a file saved at {place} has other bytes when it is read", fix)
    except (OSError, RuntimeError) as error:
        reason = plain_reason(error).splitlines()[0]
        report.error(True, f"a file of 16 MB cannot be saved at {place}: {reason}", fix)
