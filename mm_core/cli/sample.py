"""`mm sample`: clips from a trained run."""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from mm_core.cli.evaluate import add_weights, run_folder
from mm_core.cli.train import refuse_among_ranks
from mm_core.errors import MMError


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="over the run's config, for folders that have moved"
    )
    parser.add_argument(
        "--run", required=True, metavar="DIR[@STEP]", help="a run's folder, or one of its checkpoints"
    )
    parser.add_argument(
        "--prompt", action="append", default=[], help="what to show; may be given several times"
    )
    parser.add_argument("--prompts", metavar="FILE", help="one prompt a line, or JSON/JSONL")
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="first frame, for image-to-video; given once for all prompts, or once for each",
    )
    parser.add_argument(
        "--last-image",
        metavar="FILE",
        action="append",
        default=[],
        help="last frame, where the model takes one",
    )
    parser.add_argument("--negative-prompt", default="", help="what guidance leads away from")
    parser.add_argument("--seed", type=int, default=0, help="clip i's noise comes from (seed, i)")
    parser.add_argument("--steps", type=_count, help="solver steps")
    parser.add_argument(
        "--guidance",
        type=_number(0),
        nargs="+",
        help="classifier-free guidance scale; up to 1 it is off; several: one for each expert",
    )
    parser.add_argument("--num-frames", type=_count, help="frames (default: as trained)")
    parser.add_argument("--height", type=_count, help="pixels (default: as trained)")
    parser.add_argument("--width", type=_count, help="pixels (default: as trained)")
    parser.add_argument("--fps", type=_number(1 / 60), help="frames a second of the files")
    add_weights(parser)
    parser.add_argument(
        "--nproc",
        type=_count,
        metavar="N",
        help="ranks on this host that share the model, as in training, and the prompts (default 1)",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="folder of the files (default: a new one in the run's samples/)"
    )


def execute(args: argparse.Namespace) -> int:
    """Writes one mp4 a prompt and a contact sheet. Under a launcher (RANK is set) this process is a rank,
    and does not return."""
    if "RANK" in os.environ:
        refuse_among_ranks(["--nproc"] if args.nproc is not None else [])
        from mm_core.train.failure import leave, run_as_rank

        signal.signal(signal.SIGINT, signal.SIG_DFL)  # heard in a collective too; there is nothing to save
        leave(run_as_rank(lambda: _sample(args)))
    _check(args)
    if args.nproc in (None, 1):
        return _sample(args)
    from mm_core.train.launch import Nodes, launch

    return launch(
        [sys.executable, "-m", "mm_core.cli.main", *_words(args)], Nodes(args.nproc), announce=False
    )


def _check(args: argparse.Namespace) -> None:
    """MMError for what is wrong at first sight."""
    run_folder(args.run)
    if not args.prompt and not args.prompts:
        raise MMError("there is no prompt", accepted="--prompt TEXT, or --prompts FILE")


def _words(args: argparse.Namespace) -> list[str]:
    """The command line of a rank."""
    options = vars(args).copy()
    words = ["sample", *options.pop("overrides")]
    del options["nproc"]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if name == "guidance" and value is not None:
            words += [option, *map(str, value)]
        elif isinstance(value, list):
            words += [f"{option}={each}" for each in value]
        elif value is not None:
            words.append(f"{option}={value}")
    return words


def _sample(args: argparse.Namespace) -> int:
    """Alone, or as one of several ranks."""
    _check(args)
    from mm_core.train.agreement import Ranks
    from mm_core.train.prompts import read_prompts
    from mm_core.train.sampling import among_ranks, sample

    run, prompts = run_folder(args.run), list(args.prompt)
    if args.prompts:
        prompts += read_prompts(Path(args.prompts))
    root = run.parent.parent if run.parent.name == "checkpoints" else run
    with among_ranks():
        ranks, folder = Ranks.current(), root / "samples" / f"seed_{args.seed}"
        out = Path(args.out) if args.out else ranks.first("choosing a folder", lambda: unused(folder))
        sample(
            args.run,
            prompts=prompts,
            images=args.image,
            last_images=args.last_image,
            negative_prompt=args.negative_prompt,
            seed=args.seed,
            steps=args.steps,
            guidance=args.guidance[0] if args.guidance and len(args.guidance) == 1 else args.guidance,
            num_frames=args.num_frames,
            height=args.height,
            width=args.width,
            fps=args.fps,
            out=out,
            weights=args.weights,
            checkpoint=args.checkpoint,
            overrides=args.overrides,
            keep=False,
        )
    if ranks.rank == 0:
        count = f"{len(prompts)} clip{'s' * (len(prompts) != 1)}"
        print(f"{count} in {out}; all at a glance: {out / 'contact_sheet.png'}", flush=True)
    return 0


def unused(folder: Path) -> Path:
    """`folder`, or the first of `folder-2`, `folder-3`, ... that does not exist: nothing is overwritten."""
    names = (folder if n == 1 else folder.with_name(f"{folder.name}-{n}") for n in itertools.count(1))
    return next(path for path in names if not path.exists())


def _number(least: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not a number of {least:g} or more")
        return value

    return number


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value
