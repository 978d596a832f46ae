"""Runs the first setting that `mm-train --dry-run --fit` finds for a device with 0.7 of the memory of a run.

    python benchmarks/fit.py

It must fit, and be faster than the second where the plan has it faster by more than 15 %: processor time of
a step, one rank and one thread, three rounds in turn. Nothing is offloaded: a CPU has one memory.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path

from plan import DIT, NONE, TEXT, WAN, Case, allocated, document_of, forecast_of, prepare, processor_time

_STAY = "engine.offload_to_cpu=false engine.compile.modules=false"
_BATCH = "train.micro_batch_size=16 train.global_batch_size=16"
_ROWS = "train.micro_batch_size=32 train.global_batch_size=32"
_WIDE = f"{_BATCH} task.predictor.ffn_dim=16384 {_STAY}"
CASES = (
    Case("dit", DIT, 1, _WIDE),
    Case("dit, all recomputed alike", DIT, 1, f"{_WIDE} engine.recompute=full"),
    Case("wan full", WAN, 1, f"{_BATCH} {_STAY}"),
    Case("wan LoRA", "wan/t2v_tiny_lora", 1, f"{_BATCH} task.text_encoder.max_length=64 {_STAY}"),
    Case("text", TEXT, 1, f"{_ROWS} {_STAY}"),
    Case("text LoRA", TEXT, 1, f"{_ROWS} train.adapters=[{{targets:auto,rank:4}}] {_STAY}"),
)
LESS, FASTER = 0.7, 1.15
CONTEXT = round(0.7 * 2**30)
"""Bytes that a device known by its memory has beside the run's."""


def main() -> int:
    """Prints what the first setting of each case needs, and its processor time beside the second's."""
    good = 0
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        os.environ |= {"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": f"{folder}/state"}
        for case in CASES:
            good += compared(case, folder)
    print(f"RESULT plan_fit_first {good} {len(CASES)} {'ok' if good == len(CASES) else 'short'}")
    return int(good < len(CASES))


def compared(case: Case, folder: str) -> bool:
    """Whether the first setting of a case keeps what the plan promises."""
    whole = forecast_of(case, folder, NONE, "--calibrate")
    tensors = max(need["allocated"] for need in whole["needs"] if need["phase"] in ("load", "step"))
    memory = CONTEXT + round(LESS * tensors)
    found = document_of(case, folder, "--fit", "--on", f"1x{memory / 2**30:.4f}GB")["fit"][:2]
    for each in found:
        print(f"  {each['forecast']['step_seconds']:.3f} s {' '.join(each['overrides'])}")
    if len(found) < 2:
        return False
    own, other = (with_settings(case, each["overrides"]) for each in found)
    taken = allocated(own, folder)["training"]
    expected = found[1]["forecast"]["step_seconds"] / found[0]["forecast"]["step_seconds"]
    rounds = [[processor_time(each, folder, ()) for each in (own, other)] for _ in range(3)]
    measured = statistics.median(second / first for first, second in rounds)
    ok = CONTEXT + taken <= memory and (expected <= FASTER or measured > 1)
    sizes = f"{taken / 2**20:8.1f} of {(memory - CONTEXT) / 2**20:.1f} MiB"
    ratios = f"second / first {expected:.3f} predicted, {measured:.3f} measured"
    print(f"{case.name:<28} {sizes}; {ratios}  {'ok' if ok else 'short'}", flush=True)
    return ok


def with_settings(case: Case, overrides: list[str]) -> Case:
    """A case with more overrides, as a process takes them: spaces in one would end it."""
    words = (each.replace(" ", "") for each in overrides)
    return case._replace(overrides=" ".join([case.overrides, *words]))


if __name__ == "__main__":
    sys.exit(main())
