"""Where training begins: at weights of a run's own, or at those of its model."""

from __future__ import annotations

from pathlib import Path

from mm_core.interchange import Left, Migrated, Node, is_loose, place_of, to_python
from mm_mindspeed.files import Files, resolve, value_at
from mm_mindspeed.names import LATEST, RELEASE
from mm_mindspeed.tables.converts import path

_NOTE = "weights to begin with, in MindSpeed-MM's names"
_CONVERTED = "the model's own weights, which are read from its folder"


def load_of(files: Files) -> Node | None:
    """The weights that a run names."""
    found = files.one_file.at("training", "load") if files.one_file is not None else files.flags.at("--load")
    if found is None or found.value in (None, "", True) or is_loose(found):  # True: an empty variable
        return None
    return found


def begin(files: Files, load: Node | None, model: str, run: Migrated) -> None:
    """Begins at the weights that a run names, unless they are those of the model: its folder, or one of the
    same name, which mm-convert wrote."""
    if load is None:
        return
    text = path(to_python(load))
    if Path(text).name == Path(model).name:
        run.dropped.append(Left(place_of(load), load.path, text, _CONVERTED))
        return
    run.set("init_from.path", text, place_of(load), _NOTE)
    place = resolve(text, files.main)
    latest = place / LATEST if place is not None else None
    saved = latest.read_text().strip() != RELEASE if latest is not None and latest.is_file() else None
    weights = value_at(files.flags, "--no-load-optim") or value_at(files.one_file, "training.no_load_optim")
    resumes = load.path in ("--load", "training.load") and files.flags.at("--finetune") is None
    if resumes and (saved or (saved is None and not weights)):
        run.todo.append(
            f"init_from.path: a run begins at step 0 with a new optimizer here; where {text} holds a save"
            " of a training, theirs goes on with its step and optimizer: set train.steps to the steps left"
        )
