"""The half of `mm sample` that answers in words."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from mm_core.cli.options import count
from mm_core.cli.runs.stored_run import check_place, unused
from mm_core.errors import MMError

if TYPE_CHECKING:
    from mm_core.checkpoint.reading import StoredRun
    from mm_core.contracts import Decoding
    from mm_core.inference.answer import Answer, AnswerSession

_WORDS: Mapping[str, object] = MappingProxyType(
    {"max_new_tokens": None, "temperature": 0.0, "top_p": 1.0, "batch_size": 1}
)
_CLIPS: Mapping[str, object] = MappingProxyType(
    {
        **{"last_image": [], "negative_prompt": "", "steps": None, "guidance": None},
        **{"num_frames": None, "height": None, "width": None, "fps": None},
    }
)
"""Options of one half alone -> what they are when nobody sets them."""


def add_decoding(parser: argparse._ActionsContainer) -> None:
    """The options that say how an answer is made."""
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="of an answer (default: the task's, else 512)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=_WORDS["temperature"],
        help="0, the default, takes the likeliest token each time",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=_WORDS["top_p"],
        help="of the likeliest tokens, the share of probability that is drawn from (default 1)",
    )


def add_batches(parser: argparse._ActionsContainer) -> None:
    """The option that says how many rows of a file are answered at once."""
    parser.add_argument(
        "--batch-size",
        type=count,
        default=_WORDS["batch_size"],
        metavar="N",
        help="rows of --prompts that a rank answers together (default 1); the answers stay the same",
    )


def decoding_of(args: argparse.Namespace) -> Decoding:
    """How an answer is made, as the command line says. MMError for figures that make none."""
    from mm_core.contracts import Decoding
    from mm_core.inference.answer import checked

    return checked(Decoding(args.max_new_tokens, args.temperature, args.top_p, args.seed))


def refuse_words(args: argparse.Namespace, task: str) -> None:
    """MMError where a run that makes clips is given options of answers."""
    _refuse(args, _WORDS, f"the task {task} makes clips")


def print_answers(args: argparse.Namespace, stored: StoredRun, samples: Path) -> int:
    """Answers prompts as they come, or the rows of a file. Several ranks work on them, and the first prints.

    source: the checkpoint. samples: the folder of files that nobody has named.
    """
    _refuse(args, _CLIPS, "the run's task answers in words")
    if args.prompts and (args.prompt or args.image):
        raise MMError(
            "--prompts is given beside --prompt or --image",
            accepted="a file whose rows name their own images, or prompts on the command line",
        )
    if args.batch_size > 1 and not args.prompts:
        raise MMError(
            "--batch-size is given without --prompts",
            accepted="rows of a file; prompts of the command line are answered one after the other",
        )
    _check_out(args)
    from mm_core.inference.answer import answer_session

    decoding = decoding_of(args)
    with answer_session(stored, weights=args.weights) as opened:
        out = (
            Path(args.out)
            if args.out
            else opened.ranks.on_first("choosing a file", lambda: unused(samples / "answers.jsonl"))
        )
        if args.prompts:
            _answer_rows(opened, opened.rows(Path(args.prompts), decoding, args.batch_size), out)
        else:
            opened.run_on_first_rank(
                lambda: _say_all(args, opened, decoding, None if args.out is None else out)
            )
    return 0


def _check_out(args: argparse.Namespace) -> None:
    """MMError for a file of answers that cannot be written, or that would replace the questions."""
    if args.out is None:
        return
    out = Path(args.out)
    check_place(out)
    if args.prompts and out.exists() and Path(args.prompts).exists() and out.samefile(args.prompts):
        raise MMError(
            "--out is the file of --prompts, whose rows the answers would replace",
            where=args.out,
            accepted="another file",
        )


def _say_all(args: argparse.Namespace, opened: AnswerSession, decoding: Decoding, out: Path | None) -> None:
    from mm_core.contracts import Turn
    from mm_core.inference.answer import Answer

    images = tuple(map(Path, args.image))
    answers = []
    for number, prompt in enumerate(args.prompt):
        if len(args.prompt) > 1:
            print("> " + prompt.encode(errors="backslashreplace").decode(), flush=True)
        said = opened.say([Turn("user", prompt, images)], decoding, number, tell)
        print(flush=True)
        answers.append(Answer(number, f"prompt {number + 1}", prompt, said))
    if out is not None:
        _write(answers, out)


def tell(text: str) -> None:
    """Prints a piece of an answer at once."""
    print(text, end="", flush=True)


def _answer_rows(opened: AnswerSession, answers: Iterable[Answer], out: Path) -> None:
    """A line of JSON for each row as soon as it is answered; those that cannot be read are counted."""
    if opened.ranks.rank:
        for _ in answers:
            pass  # the first rank has them
        return
    good, bad, reason = 0, 0, ""
    for answer in answers:
        _write([answer], out, more=good + bad > 0)
        good, bad = good + (answer.error is None), bad + (answer.error is not None)
        reason = reason or answer.error or ""
    if not good:
        raise MMError(f"no row could be read, of {bad}: {reason}", where=str(out))
    first = f"{', the first' if bad > 1 else ''}: {reason.splitlines()[0]}" if bad else ""
    told = f"; {bad} row{'s' * (bad != 1)} could not be read{first}" if bad else ""
    print(f"{good} answer{'s' * (good != 1)} in {out}{told}", flush=True)


def _write(answers: Iterable[Answer], out: Path, more: bool = False) -> None:
    """JSON lines; more: behind those of before."""
    text = "".join(json.dumps(answer.to_mapping(), ensure_ascii=False) + "\n" for answer in answers)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # A name that is no text is written as JSON's escapes.
        with out.open("a" if more else "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as fault:
        raise MMError(f"the file cannot be written: {fault.strerror or fault}", where=str(out)) from fault


def _refuse(args: argparse.Namespace, unset: Mapping[str, object], because: str) -> None:
    given = [f"--{name.replace('_', '-')}" for name, value in unset.items() if getattr(args, name) != value]
    if given:
        raise MMError(f"{because}, which takes no {' and no '.join(given)}", hint="leave it out")
