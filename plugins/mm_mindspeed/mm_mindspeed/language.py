"""Vision-language models: model.json or a YAML as a task of Transformers' models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from mm_core.errors import plural
from mm_core.interchange import Left, Migrated, Node, apply, place_of
from mm_mindspeed.begin import begin, load_of
from mm_mindspeed.files import SECTIONS, Files, value_at
from mm_mindspeed.tables.language import LANGUAGE, LANGUAGE_DATA, TOKENS
from mm_mindspeed.tables.one_file import ONE_FILE
from mm_mindspeed.video import set_sampler

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
    _task(model, run, value_at(model, "model_id"))
    apply(LANGUAGE, model, run)
    if "task.from_pretrained" not in run.lines:
        _folder(files, run)
    begin(files, load_of(files), run.lines["task.from_pretrained"].value, run)
    _tokens([model], run)
    _freeze(model, run)
    _data(files, run)
    _no_engine_patterns(run)


def migrate_one_file(files: Files, root: Node, run: Migrated) -> None:
    """A run of the newer trainer, with one YAML."""
    _task(root.at("model") or root, run, value_at(root, "model.model_id"))
    apply(ONE_FILE, root.holding({key: root.value[key] for key in SECTIONS if key in root.value}), run)
    _tokens([root.at("model"), root.at("features")], run)
    folder = run.lines.get("task.from_pretrained")
    begin(files, load_of(files), folder.value if folder is not None else "", run)
    steps = value_at(root, "training.gradient_accumulation_steps") or 1
    sharing = [value_at(root, f"parallel.{name}_size", 1) for name in _SHARING]
    shared = math.prod(each for each in sharing if isinstance(each, int))
    ranks = max(run.world // shared, 1)
    micro = value_at(root, "training.micro_batch_size", 1)
    place = place_of(root.at("training", "gradient_accumulation_steps") or root)
    note = f"{micro} x {steps} accumulated x {plural(ranks, 'rank')}"
    note += f", as {shared} of {run.world} share their samples" if shared > 1 else ""
    run.set("train.global_batch_size", micro * steps * ranks, place, note)
    if "train.epochs" in run.lines:
        run.leave("train.steps", "the epochs count")
    _data(files, run)


def _task(model: Node, run: Migrated, name: object) -> None:
    found = model.at("model_id")
    place = place_of(found) if found is not None else f"{Path(model.where).name.partition(':')[0]} model_id"
    run.set("task.type", "pretrained", place)
    auto_class = _MODELS.get(str(name), ("AutoModelForCausalLM", "", ""))[0]
    run.set("task.auto_class", auto_class, place)
    if str(name) not in _MODELS:
        why = "no model of this name is known here: any model that Transformers opens can be trained"
        run.differs.append(Left(place, "model_id", name, why))


def _tokens(places: Sequence[Node | None], run: Migrated) -> None:
    """Their default loss, where no file names one."""
    if all(node is None or node.at("loss_cfg", "loss_type") is None for node in places):
        run.differs.append(Left("default of the tool for loss_type", "loss_type", "default", TOKENS))


def _folder(files: Files, run: Migrated) -> None:
    """The model's folder, where model.json names none: that of the processor."""
    data = files.data
    for path in (
        "dataset_param.preprocess_parameters.model_name_or_path",
        "dataset_param.tokenizer_config.from_pretrained",
    ):
        found = data.at(*path.split(".")) if data is not None else None
        if found is not None:
            run.set("task.from_pretrained", str(found.value).rstrip("/"), place_of(found))
            return
    run.set("task.from_pretrained", "model", str(files.main.name))
    run.todo.append("task.from_pretrained: the folder of the model, which no file names")


def _freeze(model: Node, run: Migrated) -> None:
    name = str(value_at(model, "model_id"))
    tower, projector = _MODELS.get(name, ("", "", ""))[1:]
    encoder = model.at("image_encoder") or model
    frozen = {
        part: value_at(encoder, f"{part}.freeze", False) or value_at(model, f"freeze_{other}", False)
        for part, other in (("vision_encoder", "vision_model"), ("vision_projector", "vision_projection"))
    }
    place = place_of(encoder.at("vision_encoder", "freeze") or encoder)
    paths: list[str] = []
    if frozen["vision_encoder"] and tower:
        paths.append(tower)
    if frozen["vision_projector"] and projector:
        paths.append(projector)
    if value_at(model, "text_decoder.freeze", False) or value_at(model, "freeze_language_model", False):
        paths.append("model.model.language_model")
    if paths:
        run.set("train.freeze", paths, place)
    if tower and not projector and frozen["vision_encoder"] != frozen["vision_projector"]:
        why = "the projector lies in the vision tower here: both are frozen, or none"
        run.differs.append(
            Left(place, "image_encoder.vision_projector.freeze", frozen["vision_projector"], why)
        )


def _no_engine_patterns(run: Migrated) -> None:
    for key in ("engine.sub_modules_to_wrap", "engine.recompute_modules"):
        if key in run.lines:
            run.set(key, "auto", run.lines[key].place, "the model's own blocks")


def _data(files: Files, run: Migrated) -> None:
    data = files.data
    if data is None or "dataset_param" not in data.value:
        run.set("data.train.type", "conversations", files.main.name)
        run.set("data.train.sources.0.annotations", "data/conversations.json", files.main.name)
        run.todo.append("data.train.sources: the conversations, which no file names")
        return
    basic = "dataset_param.basic_parameters"
    for name, ours in (
        ("dataset", "annotations"),
        ("data_path", "annotations"),
        ("dataset_dir", "folder"),
        ("data_folder", "folder"),
    ):
        found = data.at(*f"{basic}.{name}".split("."))
        if found is not None and isinstance(found.value, str):
            run.set(f"data.train.sources.0.{ours}", found.value, place_of(found))
    apply(LANGUAGE_DATA, data, run)
    if "data.train.type" not in run.lines:
        run.set("data.train.type", "conversations", files.main.name)
    if "data.train.sources.0.annotations" not in run.lines:
        run.set("data.train.sources.0.annotations", "data/conversations.json", files.main.name)
        run.todo.append("data.train.sources: the conversations, which no file names")
    if run.lines["data.train.type"].value == "internvl/conversations":
        run.lines.setdefault("data.train.processor", run.lines["task.from_pretrained"])
    set_sampler(data, run)
