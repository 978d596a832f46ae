"""Language models: LLaMA-Factory's YAML, and a JSON of Transformers' TrainingArguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from mm_core.errors import ConfigError
from mm_core.interchange import Migrated, Node, apply, read_source
from mm_trainers.common import Reader, Source, file_of, files_of, found, settle, warm_up
from mm_trainers.deepspeed import use_deepspeed
from mm_trainers.tables.arguments import ARGUMENTS
from mm_trainers.tables.llamafactory import DATA_SET, LLAMA_FACTORY, LORA, MODEL, ROWS, WHOLE
from mm_trainers.values import words

_SEES = r"(?i)vl\b|vl[-_0-9]|vision|llava|gemma-?3|internvl|glm-?4\.?\d*v|paligemma|pixtral|mistral3"
_VISUAL = "(?i)qwen|glm|moss|keye|dots"
_TOWER = {True: "model.model.visual", False: "model.model.vision_tower"}
_PROJECTOR = {True: "model.model.visual.merger", False: "model.model.multi_modal_projector"}
"""Whether the tower holds the projector -> their paths."""
_SHRINKS = "theirs shrinks larger images before the processor; here the processor alone decides"
_RANKS = "train.global_batch_size: of one rank; theirs is that times the ranks"
_PACKED = "theirs packs without masks, so that conversations see each other; here each sees itself"


class LlamaFactory(Reader):
    """Reads the YAML or JSON of `llamafactory-cli train`."""

    tool = "LLaMA-Factory"
    suffixes = (".yaml", ".yml", ".json")
    keys = (*LORA, *LLAMA_FACTORY)

    def is_one(self, root: Node) -> bool:
        keys = root.value.keys()
        given = "model_name_or_path" in keys and bool(keys & {"finetuning_type", "stage", "template"})
        return given or ({"train_dataset", "model"} <= keys and "parallel" not in keys)

    def runs(self, root: Node, paths: Sequence[Path]) -> list[Migrated]:
        """A run; a ConfigError where its stage is another than sft, or its configuration the newer one."""
        return [_of_factory(Source(root, _begun(root)))]


class TrainingArguments(Reader):
    """Reads a JSON of TrainingArguments, and the DeepSpeed JSON that it names or that lies beside it."""

    tool = "Transformers"
    suffixes = (".json",)
    keys = ARGUMENTS

    def is_one(self, root: Node) -> bool:
        keys = root.value.keys()
        some = keys & {"per_device_train_batch_size", "num_train_epochs", "lr_scheduler_type"}
        return "output_dir" in keys and bool(some) and not LlamaFactory().is_one(root)

    def runs(self, root: Node, paths: Sequence[Path]) -> list[Migrated]:
        """A run, with the engine of a DeepSpeed JSON."""
        beside = files_of(paths, self.suffixes, lambda other: "zero_optimization" in other.value)
        return [_of_arguments(Source(root, _begun(root)), [file_of(each) for each in beside])]


def _begun(root: Node) -> Migrated:
    file = file_of(root)
    run = Migrated(file.stem)
    for key, value in (("run.name", file.stem), ("engine.type", "fsdp2"), ("task.type", "pretrained")):
        run.set(key, value, file.name)
    run.set("data.train.type", "conversations", file.name)
    return run


def _of_arguments(source: Source, beside: Sequence[Path]) -> Migrated:
    run, name = source.run, source.get("model_name_or_path")
    apply((*MODEL, *ARGUMENTS), source.node, run)
    _sees(source, str(name or ""))
    if name is None:
        run.set("task.from_pretrained", "model", "nowhere")
        run.todo.append("task: from_pretrained and auto_class, which the script of the training has")
    if "engine.recompute_modules" not in run.lines:
        source.set("engine.recompute_modules", None, "gradient_checkpointing")
    run.set("data.train.sources.0.annotations", "data/conversations.jsonl", "nowhere")
    run.todo.append("data.train: the rows, which the script of the training has")
    _settle(source, beside)
    return run


def _of_factory(source: Source) -> Migrated:
    run = source.run
    if "train_dataset" in source.node.value:
        what = "this is the newer configuration of LLaMA-Factory (v1), which is not known here"
        accepted = "the YAML with stage and finetuning_type"
        raise ConfigError(what, where=file_of(source.node).name, accepted=accepted)
    stage, adapted = source.get("stage", "sft"), source.get("finetuning_type", "lora") == "lora"
    if stage != "sft" or not source.get("do_train", True):
        what, accepted = f"the stage {stage!r} has no counterpart here", "stage: sft, with do_train: true"
        raise ConfigError(what, where=source.place("stage"), accepted=accepted)
    apply((*(LORA if adapted else WHOLE), *LLAMA_FACTORY), source.node, run)
    source.set("task.type", "pretrained", "stage")
    name = f"{source.get('model_name_or_path')} {source.get('template', '')}"
    if _sees(source, name):
        _freeze(source, adapted, bool(re.search(_VISUAL, name)))
        source.differ("image_max_pixels", _SHRINKS)
    _sources(source, "dataset", "data.train")
    if source.get("eval_dataset") is not None:
        source.set("data.validation.type", "conversations", "eval_dataset")
        _sources(source, "eval_dataset", "data.validation")
        for key in ("max_length", "packing", "system"):
            if line := run.lines.get(f"data.train.{key}"):
                run.set(f"data.validation.{key}", line.value, line.place, line.note)
        source.set("validation.every", source.get("eval_steps", 500), "eval_steps")
    if source.get("packing") and not source.get("neat_packing"):
        source.differ("packing", _PACKED)
    if "template" in source.node.value:
        run.todo.append("template: the model's own, see `mm data inspect`")
    _settle(source, [])
    return run


def _sees(source: Source, name: str) -> bool:
    """Sets the class of the model; whether it sees."""
    sees = bool(re.search(_SEES, name))
    auto = "AutoModelForImageTextToText" if sees else "AutoModelForCausalLM"
    source.set("task.auto_class", auto, "model_name_or_path")
    return sees


def _freeze(source: Source, adapted: bool, joined: bool) -> None:
    """Tower and projector are frozen unless the file has it otherwise."""
    keys = ("vision_tower", "multi_modal_projector", "language_model")
    tower, projector, language = (source.get(f"freeze_{key}", key != keys[2]) for key in keys)
    if adapted and (not projector or language):
        path = "freeze_language_model" if language else "freeze_multi_modal_projector"
        source.differ(path, "adapters are in the repeated blocks: write train.adapters targets")
    inner = [f"{_TOWER[joined]}.{name}" for name in ("patch_embed", "blocks")]
    paths = (inner if joined and not projector and not adapted else [_TOWER[joined]]) if tower else []
    if not adapted:
        paths += [_PROJECTOR[joined]] if projector and not (joined and tower) else []
        paths += ["model.model.language_model"] if language else []
    if paths:
        ours = "train.adapters.0.exclude" if adapted else "train.freeze"
        source.set(ours, paths, "freeze_vision_tower", "frozen, as theirs")


def _sources(source: Source, path: str, ours: str) -> None:
    """The files of data sets, by the file that describes them."""
    folder, run = str(source.get("dataset_dir", "data")), source.run
    file = found(f"{folder}/dataset_info.json", file_of(source.node))
    if file is None:
        run.todo.append(f"{ours}.sources: {folder}/dataset_info.json is not there, so it was not read")
    known = read_source(file) if file is not None else source.node.holding({})
    for number, name in enumerate(words(source.get(path, []))):
        start, info = f"{ours}.sources.{number}", known.at(name)
        entry = Source(info or known.holding({}), run)
        named = entry.get("file_name")
        by, key = (source, path) if named is None else (entry, "file_name")
        by.set(f"{start}.annotations", str(PurePosixPath(folder) / str(named or f"{name}.json")), key)
        source.set(f"{start}.folder", str(source.get("media_dir", folder)), path)
        apply(DATA_SET, known.holding({name: info} if info is not None else {}), run)
        if file is not None and named is None:
            why = "no file of this name is in dataset_info.json: fetch it, and name its file"
            source.differ(path, why, name)
        elif file is not None and entry.get("formatting") is None:
            source.differ(path, ROWS, name)


def _settle(source: Source, beside: Sequence[Path]) -> None:
    """What only holds together with other keys."""
    run, output = source.run, PurePosixPath(str(source.get("output_dir", "runs/run")))
    source.set("run.dir", str(output.parent), "output_dir")
    source.set("run.name", output.name, "output_dir")
    note = "theirs takes none off biases and norms"
    source.set("train.decay_norms_and_biases", False, "weight_decay", note)
    run.todo.append(_RANKS)
    if "train.steps" in run.lines:
        source.take_off("the steps count", "train.epochs")
    if source.get("lr_scheduler_type", "linear") != "constant":
        warm_up(source, "warmup_steps")
    if "lr_schedule.warmup_steps" in run.lines:
        source.take_off("the steps count", "lr_schedule.warmup_fraction")
    settle(source)
    use_deepspeed(source, beside)
