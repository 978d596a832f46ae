"""Compares training on conversations with images with Transformers' Trainer and TRL's collator.

    python benchmarks/chat_trainer.py [--rounds 20] [--steps 5]

Both train copies of one Qwen2.5-VL of five million parameters on the same rows and pictures in the same
order, in one process and thread, in turn: a round is `steps` steps of each, and the first is not counted.
Pictures are read from their files in each step, without data workers, and go through the same image
processor. Both compute in fp32, with AdamW and gradient clipping at 1.0, and log the loss at every step.
TRL's collator learns answers only (`assistant_only_loss`), by a template that marks the tokens that mm_core
learns: TRL's own for this model also learns the line break after each answer.

Trainer runs as it does on one rank, and, in another process, with FSDP2 and the groups of mm_core, which
shards on one rank too.

Needs the extra `dev` and TRL, which mm_core does not depend on: `pip install trl==1.16.0`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pretrained import RATE, Ours, Times, Trained, median_ratio, print_times

BAR, SAME, SAME_LATER = 1.03, 1e-5, 1e-3
RIVALS, FOLDER = ("trainer", "trainer_fsdp2"), "BENCH_DIR"
BATCH, ROWS, SCALE = 4, 240, 8
TEXT = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 64}
TEXT |= {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}
TOWER = {"depth": 4, "hidden_size": 128, "intermediate_size": 384, "num_heads": 4, "patch_size": 14}
TOWER |= {"out_hidden_size": 256, "window_size": 112, "fullatt_block_indexes": [1, 3]}
PIXELS = {"patch_size": 14, "min_pixels": 4 * 28 * 28, "max_pixels": 128 * 28 * 28}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rival", choices=RIVALS, help="one of the two alone")
    args = parser.parse_args()
    if find_spec("trl") is None:
        print("TRL is not installed: pip install trl==1.16.0")
        return 0
    if FOLDER in os.environ:
        return compare(Path(os.environ[FOLDER]), args.rounds, args.steps, args.rival)
    codes = []
    for rival in [args.rival] if args.rival else RIVALS:
        command = [sys.executable, __file__, f"--rounds={args.rounds}", f"--steps={args.steps}"]
        with tempfile.TemporaryDirectory() as folder:
            own = {FOLDER: folder, "OMP_NUM_THREADS": "1"}
            codes.append(subprocess.run([*command, f"--rival={rival}"], env=os.environ | own).returncode)
    return max(map(abs, codes))


def compare(folder: Path, rounds: int, steps: int, rival: str) -> int:
    sys.path.append(str(Path(__file__).parents[1] / "tests"))  # where tiny models and conversations are made
    from mm_core.runtime.groups import start_process_group
    from support.chat_rows import make_chat_rows

    make_chat_rows(folder / "rows", ROWS, scale=SCALE)
    save_model(folder)
    start_process_group()
    turns = (rounds + 1) * steps
    loops = {
        "mm_core": Ours(folder, document_of(folder, turns)),
        rival: TrainedOnChats(folder, turns, rival == "trainer_fsdp2", per_device_train_batch_size=BATCH),
    }
    times: Times = {name: [] for name in loops}
    for round_ in range(rounds + 1):
        for name in [*loops][:: 1 if round_ % 2 else -1]:
            began = time.perf_counter(), time.process_time()
            loops[name].run(steps)
            ended = time.perf_counter(), time.process_time()
            times[name].append(tuple((b - a) / steps for a, b in zip(began, ended, strict=True)))
    losses = [loop.losses for loop in loops.values()]
    good = report({name: each[1:] for name, each in times.items()}, rival, *losses)
    sys.stdout.flush()
    os._exit(0 if good else 1)  # the thread of the Trainer waits for another turn


def report(times: Times, rival: str, ours: list[float], theirs: list[float]) -> bool:
    """Prints the table and the RESULT lines; returns whether the bars are met."""
    print_times(times, 1)
    print(f"losses: first {ours[0]:.6f} and {theirs[0]:.6f}, last {ours[-1]:.6f} and {theirs[-1]:.6f}")
    apart = [abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)]
    met = True
    for name, value, bar in (
        ("first_loss", apart[0], SAME),
        ("losses", max(apart), SAME_LATER),
        ("cpu", median_ratio(times, rival, 1), BAR),
    ):
        met &= value <= bar
        print(f"RESULT chat_{rival}_{name} {value:.4g} {bar} {'ok' if value <= bar else 'short'}")
    return met


def save_model(folder: Path) -> None:
    """Writes `model`: the tests' Qwen2.5-VL with larger layers, and patches of the published size."""
    from support.chat_families import FAMILIES
    from support.chat_models import save_chat_model

    tiny = FAMILIES["qwen2_5_vl"]

    def larger(ids: Any, rows: int) -> dict[str, Any]:
        config = tiny.config(ids, rows)
        return config | {
            "text_config": config["text_config"] | TEXT,
            "vision_config": config["vision_config"] | TOWER,
        }

    FAMILIES["model"] = replace(tiny, config=larger, image={**tiny.image, **PIXELS})
    save_chat_model("model", folder)


def document_of(folder: Path, turns: int) -> dict[str, Any]:
    """Config of mm_core's run."""
    return {
        "task": {
            "type": "pretrained",
            "from_pretrained": str(folder / "model"),
            "auto_class": "AutoModelForImageTextToText",
        },
        "data": {
            "train": {
                "type": "conversations",
                "sources": [{"annotations": str(folder / "rows/chat.jsonl")}],
                "max_length": 4096,
            },
            "loader": {"workers": 0, "sampler": "sequential"},
        },
        "optimizer": {"type": "adamw", "lr": RATE, "weight_decay": 0.0},
        "train": {"steps": turns, "micro_batch_size": BATCH, "global_batch_size": BATCH},
    }


class TrainedOnChats(Trained):
    """Trainer with TRL's collator, of the same rows."""

    def parts(self) -> tuple[Any, Any, Any]:
        from transformers import AutoModelForImageTextToText
        from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

        from mm_core.tasks.conversations.opening import open_processor
        from support.chat_models import template_of

        model = AutoModelForImageTextToText.from_pretrained(self.folder / "model")
        collate = DataCollatorForVisionLanguageModeling(
            open_processor(str(self.folder / "model")),
            assistant_only_loss=True,
            chat_template=marked(template_of("qwen2_5_vl")),
        )
        return model, Pictured(self.folder / "rows"), collate

    def blocks(self, model: Any) -> tuple[Any, ...]:
        return model.model.language_model.layers[0], model.model.visual.blocks[0]


def marked(template: str) -> str:
    """The tests' template, with marks around what is learnt: a turn of the assistant up to its last token."""
    head, content, end = template.partition("{%- if turn.content is string -%}")
    body, _, tail = (content + end).partition("{{- '<|im_end|>\\n' -}}\n{%- endfor -%}")
    learnt = body + "{{- '<|im_end|>' -}}\n"
    return (
        f"{head}{{%- if turn.role == 'assistant' -%}}{{%- generation -%}}\n{learnt}{{%- endgeneration -%}}\n"
        f"{{%- else -%}}{learnt}{{%- endif -%}}{{{{- '\\n' -}}}}\n{{%- endfor -%}}{tail}"
    )


class Pictured:
    """The rows as TRL takes them: messages, and opened pictures."""

    def __init__(self, folder: Path) -> None:
        from support.chat_rows import messages_of

        lines = (folder / "chat.jsonl").read_text(encoding="utf-8").splitlines()
        self.rows = [messages_of(json.loads(line), folder) for line in lines]
        self.files = [
            [part.pop("path") for turn in row for part in turn["content"] if part["type"] == "image"]
            for row in self.rows
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        from PIL import Image

        return {"messages": self.rows[index], "images": [Image.open(file) for file in self.files[index]]}


if __name__ == "__main__":
    sys.exit(main())
