"""`mm sample`: makes clips with a trained run, or answers in words."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mm_core.cli.options import count
from mm_core.cli.ranks import add_ranks, on_ranks
from mm_core.cli.runs.answers import add_batches, add_decoding, print_answers, refuse_words
from mm_core.cli.runs.stored_run import add_run, open_stored, root_of, run_folder, unused
from mm_core.errors import MMError, plural

if TYPE_CHECKING:
    from mm_core.checkpoint.reading import StoredRun


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        help="text to make a clip of, or to answer; may be repeated",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="file of prompts; for clips: one per line, or JSON/JSONL; for answers: rows as in the dataset",
    )
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="for answers: image placed before each prompt, in order; for image-to-video: first frame, once"
        " for all prompts or once per prompt",
    )
    words = parser.add_argument_group("runs that answer in words")
    add_decoding(words)
    add_batches(words)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="random seed; clip or answer i is drawn from (seed, i) (default 0)",
    )
    add_ranks(parser, ", and the prompts")
    parser.add_argument(
        "--out",
        metavar="PATH",
        help="folder for the clips, or JSONL file for the answers (default: a new one in the run's samples/)",
    )
    _add_clips(parser.add_argument_group("runs that make clips"))


def _add_clips(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--last-image",
        metavar="FILE",
        action="append",
        default=[],
        help="last frame, for models that accept one",
    )
    parser.add_argument(
        "--input",
        metavar="NAME=FILE",
        nargs="+",
        action="append",
        default=[],
        help="further input of the model: a picture, a clip, or a number; once for all prompts or once per"
        " prompt; several pictures: NAME=FILE NAME=FILE",
    )
    parser.add_argument("--negative-prompt", default="", help="text that guidance steers away from")
    parser.add_argument("--steps", type=count, help="number of solver steps")
    parser.add_argument(
        "--guidance",
        type=_number(0),
        nargs="+",
        action="extend",
        help="guidance scale: classifier-free (off up to 1), or the input of models with embedded guidance;"
        " one value, or one per expert",
    )
    parser.add_argument("--num-frames", type=count, help="frames per clip (default: as trained)")
    parser.add_argument("--height", type=count, help="height in pixels (default: as trained)")
    parser.add_argument("--width", type=count, help="width in pixels (default: as trained)")
    parser.add_argument("--fps", type=_number(1 / 60), help="frames per second of the clip files")


def execute(args: argparse.Namespace) -> int:
    """Runs `mm sample`: writes one mp4 per prompt and a contact sheet, or prints answers.

    Under a launcher (RANK is set) this process is a rank, and does not return.
    """
    return on_ranks(args, "sample", _sample, _check, before_launch=open_stored)


def _check(args: argparse.Namespace) -> None:
    run_folder(args.run)
    if not args.prompt and not args.prompts:
        raise MMError("there is no prompt", where="command line", accepted="--prompt TEXT, or --prompts FILE")


def _sample(args: argparse.Namespace) -> int:
    _check(args)
    from mm_core.inference.answer import makes_words

    stored = open_stored(args)
    root = root_of(stored.checkpoint.folder)
    if makes_words(stored.config.registry, stored.config.task):
        return print_answers(args, stored, root / "samples")
    refuse_words(args, stored.config.task.type)
    return _sample_clips(args, stored, root)


def _sample_clips(args: argparse.Namespace, stored: StoredRun, root: Path) -> int:
    from mm_core.data.rows.prompts import read_prompts
    from mm_core.inference.sample import among_ranks, sample

    prompts, inputs = list(args.prompt), _inputs(args.input)
    if args.prompts:
        prompts += read_prompts(Path(args.prompts))
    folder = root / "samples" / f"seed_{args.seed}"
    with among_ranks() as ranks:
        out = Path(args.out) if args.out else ranks.on_first("choosing a folder", lambda: unused(folder))
        sample(
            stored,
            prompts=prompts,
            images=args.image,
            last_images=args.last_image,
            inputs=inputs,
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
            keep=False,
        )
    if ranks.rank == 0:
        clips = plural(len(prompts), "clip")
        print(f"{clips} in {out}; overview: {out / 'contact_sheet.png'}", flush=True)
    return 0


def _inputs(given: list[list[str]]) -> dict[str, list[str | list[str]]]:
    """The values of each field, in order; a name that one option repeats has several in one."""
    found: dict[str, list[str | list[str]]] = {}
    for option in given:
        own: dict[str, list[str]] = {}
        for each in option:
            name, equals, value = each.partition("=")
            if not (name and equals and value):
                raise MMError(
                    f"--input {each} names no field", where="command line", accepted="--input NAME=FILE"
                )
            own.setdefault(name, []).append(value)
        for name, values in own.items():
            found.setdefault(name, []).append(values if len(values) > 1 else values[0])
    return found


def _number(least: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not a number >= {least:g}")
        return value

    return number
