"""Vision-language models: model.json or a YAML as a task of Transformers' models."""

from __future__ import annotations

import math

from mm_core.errors import ConfigError, plural
from mm_core.interchange import Left, Line, Migrated, Node, apply
from mm_mindspeed.begin import begin, load_of
from mm_mindspeed.files import SECTIONS, Files, place_at, value_at
from mm_mindspeed.tables.language import FROZEN, LANGUAGE, LANGUAGE_DATA
from mm_mindspeed.tables.one_file import ONE_FILE

_SHARING = ("tensor_parallel", "ulysses_parallel", "ring_attention")
_IMAGES = "AutoModelForImageTextToText"
_MODELS: dict[str, tuple[str, str, str]] = {
    **dict.fromkeys(
        ("qwen2vl", "qwen2_5vl", "qwen3_vl", "qwen3_vl_moe", "glm4v_moe", "qwen3_5", "qwen3_5_moe"),
        (_IMAGES, "model.model.visual", ""),
    ),
    "internvl": (
        "mm_internvl.model:InternVLForConditionalGeneration",
        "model.model.vision_tower",
        "model.model.multi_modal_projector",
    ),
    "mistral3": (_IMAGES, "model.model.vision_tower", "model.model.multi_modal_projector"),
}
"""model_id -> the class, its vision tower, and its projector where that lies outside of the tower."""


def migrate_language(files: Files, model: Node, run: Migrated) -> None:
    """A run with model.json, or with a YAML of `gpt_args`."""
    _task(model, "model_id", run)
    apply(LANGUAGE, model, run)
    _freeze(model, run)
    _data(files, run)


def migrate_one_file(files: Files, root: Node, run: Migrated) -> None:
    """A run of the newer trainer, with one YAML."""
    _task(root, "model.model_id", run)
    apply(ONE_FILE, root.holding({key: root.value[key] for key in SECTIONS if key in root.value}), run)
    steps = value_at(root, "training.gradient_accumulation_steps") or 1
    sharing = [value_at(root, f"parallel.{name}_size", 1) for name in _SHARING]
    shared = math.prod(each for each in sharing if isinstance(each, int))
    ranks = max(run.world // shared, 1)
    micro = value_at(root, "training.micro_batch_size", 1)
    note = f"{micro} x {steps} accumulated x {plural(ranks, 'rank')}"
    note += f", as {shared} of {run.world} share their samples" if shared > 1 else ""
    place = place_at(root, "training.gradient_accumulation_steps")
    run.set("train.global_batch_size", micro * steps * ranks, place, note)
    if "train.epochs" in run.lines:
        run.leave("train.steps", "the epochs count")
    _data(files, run)


def _task(root: Node, key: str, run: Migrated) -> None:
    name, place = value_at(root, key), place_at(root, key)
    if name not in _MODELS:
        what = f"the model {name!r} has no counterpart here" if name else f"these files have no {key}"
        accepted = ", ".join(["wandit", "vace", "hunyuanvideo15dit", *_MODELS])
        hint = "a model that Transformers opens is trained by the task `pretrained`, in a config of your own"
        raise ConfigError(what, where=place if name else run.name, accepted=accepted, hint=hint)
    run.set("task.type", "pretrained", place)
    run.set("task.auto_class", _MODELS[name][0], place)


def _freeze(model: Node, run: Migrated) -> None:
    _, tower, projector = _MODELS[value_at(model, "model_id")]
    paths = {"tower": tower, "projector": projector, "language_model": "model.model.language_model"}
    frozen = {part: [key for key in keys if value_at(model, key)] for part, keys in FROZEN.items()}
    if named := [paths[part] for part, keys in frozen.items() if keys and paths[part]]:
        first = next(key for keys in frozen.values() for key in keys)
        run.set("train.freeze", named, place_at(model, first))
    if tower and not projector and bool(frozen["tower"]) != bool(frozen["projector"]):
        key = FROZEN["projector"][0]
        why = "the projector lies in the vision tower here: both are frozen, or none"
        run.differs.append(Left(place_at(model, key), key, bool(frozen["projector"]), why))


def _data(files: Files, run: Migrated) -> None:
    main, lines = files.main.name, run.lines
    if files.data is not None:
        apply(LANGUAGE_DATA, files.data, run)
    lines.setdefault("data.train.type", Line("conversations", main))
    if "data.train.sources.0.annotations" not in lines:
        run.set("data.train.sources.0.annotations", "data/conversations.json", main)
        run.todo.append("data.train.sources: the conversations, which no file names")
    processor = lines.get("data.train.processor")
    if "task.from_pretrained" not in lines and processor is None:
        run.todo.append("task.from_pretrained: the folder of the model, which no file names")
    model = lines.setdefault("task.from_pretrained", processor or Line("model", main))
    if lines["data.train.type"].value == "internvl/conversations":
        lines.setdefault("data.train.processor", model)
    begin(files, load_of(files), model.value, run)
