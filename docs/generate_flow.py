"""Draws docs/assets/flow.svg: how a run flows, and which rooms of mm_core do it.

python docs/generate_flow.py            writes the drawing
python docs/generate_flow.py --check    exits 1 when the drawing is not what would be written
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

from generated_page import main

PICTURE = Path(__file__).parent / "assets" / "flow.svg"

WIDTH, LEFT, BOX, NOTE = 450, 14, 252, 284
"""Of the drawing; where boxes begin; their width; where notes begin. Narrow, so that a telephone shows the
text at a size that can be read."""
LINE, GAP, PAD = 18, 22, 9
"""Height of a line of text, between two boxes, and within a box above and below its text."""
_STYLE = """
  text { font: 14px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1c2733 }
  .rooms { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #3949ab }
  .note { font-size: 12px; fill: #55616d }
  .loop { font-size: 12px; fill: #8a5a00 }
"""


@dataclass(frozen=True)
class Stage:
    """A box of the drawing.

    Attributes:
        title: what happens.
        rooms: folders of mm_core that do it.
        notes: beside the box: what enters, or what is written.
        step: whether it is repeated on every step.
    """

    title: str
    rooms: tuple[str, ...]
    notes: tuple[str, ...] = ()
    step: bool = False


STAGES = (
    Stage("check the complete YAML", ("config", "plugin"), ("run.yaml, overrides;", "torch is not loaded")),
    Stage("start one process per rank", ("runtime",), ("mm-train, torchrun,", "srun")),
    Stage("build without memory, plan", ("plan",), ("--dry-run prints the", "plan and stops")),
    Stage(
        "shard, then fill the shards", ("engines", "loading"), ("from a checkpoint, files,", "or at random")
    ),
    Stage("read a micro-batch", ("data",), ("your clips, images,", "texts"), step=True),
    Stage("compute the loss", ("tasks", "diffusion"), ("the model of a plugin",), step=True),
    Stage("backward, reduce over ranks", ("engines", "parallel"), (), step=True),
    Stage("judge, clip, update", ("training", "optim"), ("not finite: skipped", "or ended"), step=True),
    Stage("log", ("telemetry",), ("metrics.jsonl", "TensorBoard, W&B, ..."), step=True),
    Stage(
        "save, evaluate",
        ("checkpoint", "evaluation"),
        ("checkpoints/step_N", "samples/, validation"),
        step=True,
    ),
    Stage("sample, answer, evaluate", ("inference",), ("mm sample, mm chat,", "mm eval")),
    Stage("export, import, compare", ("interchange",), ("mm export, mm weights,", "mm import")),
)
"""What the drawing shows, from top to bottom."""


def height_of(stage: Stage) -> int:
    """Height of a stage's box, in pixels."""
    return 2 * PAD + LINE * max(2, len(stage.notes))


def box(stage: Stage, top: int) -> list[str]:
    """The box of a stage with its two lines of text, and its notes to the right of it."""
    height = height_of(stage)
    x, width = (LEFT + 14, BOX - 28) if stage.step else (LEFT, BOX)
    fill = "#fff8e8" if stage.step else "#eef1fb"
    border = "#c99a3a" if stage.step else "#5c6bc0"
    rooms, first_line = escape(", ".join(stage.rooms)), top + PAD + 13
    parts = [
        f'<rect x="{x}" y="{top}" width="{width}" height="{height}" rx="6" fill="{fill}" stroke="{border}"/>',
        f'<text x="{x + 10}" y="{first_line}">{escape(stage.title)}</text>',
        f'<text class="rooms" x="{x + 10}" y="{first_line + LINE}">{rooms}</text>',
    ]
    first = top + (height - LINE * len(stage.notes)) // 2 + 13
    parts += [
        f'<text class="note" x="{NOTE}" y="{first + index * LINE}">{escape(note)}</text>'
        for index, note in enumerate(stage.notes)
    ]
    return parts


def arrow(top: int, bottom: int) -> str:
    """A line downwards with a head, from one box to the next."""
    x = LEFT + BOX // 2
    return (
        f'<path d="M{x} {top}V{bottom - 1}M{x - 4} {bottom - 6}L{x} {bottom - 1}L{x + 4} {bottom - 6}"'
        ' fill="none" stroke="#55616d"/>'
    )


def loop_frame(top: int, bottom: int) -> list[str]:
    """The frame around the stages of a step, with the arrow back to its first one."""
    x, right = LEFT, LEFT + BOX
    return [
        f'<rect x="{x}" y="{top}" width="{BOX}" height="{bottom - top}" rx="8" fill="none" stroke="#c99a3a"'
        ' stroke-dasharray="5 4"/>',
        f'<text class="loop" x="{x + 10}" y="{top + 16}">each step</text>',
        f'<path d="M{right - 14} {bottom - 38}H{right - 6}V{top + 44}H{right - 13}M{right - 8} {top + 40}'
        f'L{right - 13} {top + 44}L{right - 8} {top + 48}" fill="none" stroke="#8a5a00"/>',
    ]


def render() -> str:
    """The drawing as SVG."""
    parts: list[str] = []
    y, begin = 14, 0
    for index, stage in enumerate(STAGES):
        before = STAGES[index - 1] if index else None
        if stage.step and before is not None and not before.step:
            parts.append(arrow(y - GAP, y))
            begin, y = y, y + 24
        elif before is not None and before.step and not stage.step:
            y += 12 - GAP
            parts += loop_frame(begin, y)
            y += GAP
            parts.append(arrow(y - GAP, y))
        elif before is not None:
            parts.append(arrow(y - GAP, y))
        parts += box(stage, y)
        y += height_of(stage) + GAP
    height = y - GAP + 14
    title = "How a run flows: from the YAML through the steps to checkpoints, samples and exports"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
            f' height="{height}" role="img" aria-label="{title}">',
            "<!-- Made by docs/generate_flow.py: do not edit. -->",
            f"<title>{title}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    sys.exit(main(lambda: {PICTURE: render()}, "generate_flow.py", __doc__))
