"""What a pipeline's own code costs beside its transformer, and where a forward waits for the device.

    python benchmarks/diffusers_forward.py [--rounds 60] [--device cuda]

For each family a tiny pipeline and three captions of different lengths. Processor time: the predictor's
forward, whose arguments the pipeline's own code prepares, in turn with the transformer's own call with
arguments that are ready; the median of the differences of all rounds. Waits: calls by which the host reads a
tensor (`item`, `tolist`, `bool`, `nonzero`, indices that are masks), with the lines of the code that makes
them. On a CPU, reads of tensors that are on the host anyway count too; on CUDA, torch's own
`set_sync_debug_mode` finds those that wait.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mm_diffusers.testing import TINY, tiny_pipeline
from mm_diffusers.testing.parity import forward_inputs
from mm_diffusers.transformer import DiffusersTransformer
from torch import Tensor
from torch.overrides import TorchFunctionMode

BAR = 1.5
"""Milliseconds of processor time for a forward."""

READS = {
    getattr(Tensor, name)
    for name in ("item", "tolist", "nonzero", "__bool__", "__int__", "__float__", "cpu", "numpy")
} | {torch.nonzero, torch.equal, torch.masked_select, torch.unique}
LIBRARIES = ("/torch/", "/einops/", "/contextlib.py")


def main() -> int:
    """Measures all families in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'family':<26}{'forward, ms':>12}{'alone, ms':>11}{'more, ms':>10}   waits of a forward")
    results: list[tuple[str, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in TINY:
            predictor, given = prepared(kind, Path(folder) / kind, args.device)
            results += of_family(kind, predictor, given, args)
    for name, value, bar in results:
        print(f"RESULT {name} {value:.3g} {bar} {'ok' if value <= bar else 'short'}")
    return int(any(value > bar for _, value, bar in results))


def of_family(
    kind: str, predictor: DiffusersTransformer, given: dict[str, Any], args: argparse.Namespace
) -> list[tuple[str, float, float]]:
    """Prints the line of a family; the names, values and bars of its results."""
    ready = arguments_of(predictor, given)

    def alone() -> None:
        predictor.transformer(*ready[0], **ready[1])

    def whole() -> None:
        predictor(**given)

    ours, theirs = timed([whole, alone], args.rounds)
    more = statistics.median(a - b for a, b in zip(ours, theirs, strict=True))
    found = waits(whole, args.device)
    mine = sum(count for place, count in found.items() if place.startswith("mm_"))
    shown = ", ".join(by_file(found)) or "none"
    medians = [statistics.median(times) for times in (ours, theirs)]
    print(f"{kind:<26}{medians[0]:>12.2f}{medians[1]:>11.2f}{more:>10.2f}   {shown}", flush=True)
    return [(f"diffusers_forward_ms_{kind}", more, BAR), (f"diffusers_forward_waits_{kind}", mine, 0)]


def by_file(found: Counter[str]) -> list[str]:
    """The files of places, each with its lines and how many waits they make."""
    lines: dict[str, list[str]] = {}
    for place in sorted(found):
        file, _, line = place.partition(":")
        lines.setdefault(file, []).append(line)
    counts = {file: sum(found[f"{file}:{line}"] for line in own) for file, own in lines.items()}
    return [f"{file}:{','.join(own)} ({counts[file]})" for file, own in lines.items()]


def prepared(kind: str, folder: Path, device: str) -> tuple[DiffusersTransformer, dict[str, Any]]:
    """The predictor of a tiny pipeline, and arguments of its forward for three pictures."""
    predictor = DiffusersTransformer(str(tiny_pipeline(folder, kind))).eval().requires_grad_(False)
    lengths = [5, 17, 40]
    given = forward_inputs(predictor, lengths, (8, 12))
    on = {name: tensor.to(device) for name, tensor in given.items()}
    return predictor.to(device), {**on, "text_lengths": lengths}


def arguments_of(
    predictor: DiffusersTransformer, given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which the predictor calls its transformer."""
    found: list[Any] = []
    hook = predictor.transformer.register_forward_pre_hook(
        lambda module, args, named: found.append((args, named)), with_kwargs=True
    )
    predictor(**given)
    hook.remove()
    args, named = found[0]
    return args, named


def timed(calls: list[Callable[[], None]], rounds: int) -> list[list[float]]:
    """Milliseconds of processor time of each call in each round; the first rounds are not counted."""
    times: list[list[float]] = [[] for _ in calls]
    for round_ in range(rounds + 5):
        for place in (0, 1) if round_ % 2 else (1, 0):
            began = time.process_time()
            calls[place]()
            times[place].append(1000 * (time.process_time() - began))
    return [values[5:] for values in times]


class Reads(TorchFunctionMode):
    """Notes the places where the host reads a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS or (func in (Tensor.__getitem__, Tensor.__setitem__) and masked(args[1])):
            self.found[place(traceback.extract_stack())] += 1
        return func(*args, **(kwargs or {}))


def masked(index: Any) -> bool:
    """Whether an index has a mask in it, whose true values the host counts."""
    each = index if isinstance(index, tuple) else (index,)
    return any(isinstance(one, Tensor) and one.dtype == torch.bool for one in each)


def place(stack: Any) -> str:
    """The innermost line that is neither torch's nor this file's: `mm_diffusers/families.py:10`."""
    own = [frame for frame in stack if not any(name in frame.filename for name in (*LIBRARIES, __file__))]
    return f"{'/'.join(Path(own[-1].filename).parts[-2:])}:{own[-1].lineno}"


def waits(call: Callable[[], None], device: str) -> Counter[str]:
    """Places where a call waits for the device, and how often."""
    if device == "cpu":
        with Reads() as reads:
            call()
        return reads.found
    found: Counter[str] = Counter()

    def note(*_: Any, **__: Any) -> None:
        found[place(traceback.extract_stack())] += 1

    shown, warnings.showwarning = warnings.showwarning, note
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        warnings.showwarning = shown
    return found


if __name__ == "__main__":
    sys.exit(main())
