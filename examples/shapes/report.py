"""Samples captions that are not in the training data, judges the clips from pixels, and prints the paths
of all results.

    python examples/shapes/report.py --config configs/custom_dit/quickstart.yaml

The last lines are `RESULT <name> <value> <bar> <ok|short>`; the exit code is 1 if one of them is short.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mm_core

sys.path.insert(0, str(Path(__file__).parent))
from judge import Score, judge_prompt, score

FOLLOWED = 0.95  # required share of clips with the caption's colour, and with its direction
ABOVE_CHANCE = 0.10  # largest distance above chance of a score against other clips' captions


@dataclass(frozen=True)
class Result:
    """One measured value and its bar."""

    name: str
    value: float
    bar: float
    ok: bool

    def __str__(self) -> str:
        return f"RESULT {self.name} {self.value:.4f} {self.bar:.4f} {'ok' if self.ok else 'short'}"


def results(judged: Score, prompts: Sequence[str]) -> list[Result]:
    """Results of the judged clips: shares of right colours and directions, and a control with captions of
    other clips."""
    lines = []
    for part in ("colour", "direction"):
        value = getattr(judged, part)
        lines.append(Result(f"caption_{part}", value, FOLLOWED, value >= FOLLOWED))
    for part in ("colour", "direction"):
        value, bar = getattr(judged, f"control_{part}"), chance(prompts, part) + ABOVE_CHANCE
        lines.append(Result(f"control_{part}", value, bar, value <= bar))
    return lines


def chance(prompts: Sequence[str], part: str) -> float:
    """Share of pairs of different prompts that agree in a part: the score of right clips by chance."""
    asked = [getattr(judge_prompt(prompt), part) for prompt in prompts]
    same: int = sum(a == b for a in asked for b in asked) - len(asked)
    return same / max(1, len(asked) * (len(asked) - 1))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0 if every result is ok, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="the YAML used for training")
    parser.add_argument("--prompts", type=Path, default=Path("data/shapes/held_out.json"), help="a JSON list")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed for the clips' noise (default: %(default)s)"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="the same overrides as for mm-train"
    )
    options = parser.parse_args(arguments)
    from mm_core.data import read_prompts, write_clips

    try:
        config = mm_core.load_config(options.config, options.overrides)
        run = Path(config.run.dir) / config.run.name
        prompts = [prompt.text for prompt in read_prompts(options.prompts)]
        began = time.perf_counter()
        clips = mm_core.sample(run, prompts=prompts, seed=options.seed)
        seconds = time.perf_counter() - began
        sheet = write_clips(clips, run / "samples")
    except mm_core.MMError as error:
        print(f"report: error: {error.render()}", file=sys.stderr)
        return 1
    judged = score([clip.pixels.float().cpu().numpy() for clip in clips], prompts)
    found = results(judged, prompts)
    (run / "report.json").write_text(json.dumps({r.name: r.value for r in found}, indent=1) + "\n")
    print(f"\nsampled {len(clips)} captions with combinations not in the training data, in {seconds:.1f} s\n")
    print(judged.table())
    print(f"\n  samples      {run / 'samples'} (overview: {sheet})")
    if (run / "loss.png").exists():  # drawn with the extra `plots`
        print(f"  loss curve   {run / 'loss.png'}")
    print(f"  checkpoints  {run / 'checkpoints'}")
    command = os.path.relpath(Path(sys.executable).parent / "mm")
    print(f"  sample more  {command} sample --run {run} --prompt 'a red circle moves left'\n")
    print("\n".join(map(str, found)))
    return 0 if all(result.ok for result in found) else 1


if __name__ == "__main__":
    sys.exit(main())
