"""Language models: LLaMA-Factory's YAML, and a JSON of Transformers' TrainingArguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from mm_core.errors import ConfigError
from mm_core.interchange import Left, Migrated, Node, apply, read_source
from mm_trainers.common import Source, checked, file_of, files_of, settle, words
from mm_trainers.tables.arguments import ARGUMENTS
from mm_trainers.tables.llamafactory import DATA_SET, LLAMA_FACTORY, ROWS

_SUFFIXES = (".yaml", ".yml", ".json")
_SEES = re.compile(
    r"vl\b|vl[-_0-9]|vision|llava|gemma-?3|internvl|glm-?4\.?\d*v|paligemma|pixtral|mistral3", re.I
)
_VISUAL = re.compile(r"qwen|glm|moss|keye|dots", re.I)
_TOWER = {True: "model.model.visual", False: "model.model.vision_tower"}
_PROJECTOR = {True: "model.model.visual.merger", False: "model.model.multi_modal_projector"}
"""Whether the tower holds the projector -> their paths."""
_SHRINKS = "theirs shrinks larger images before the processor; here the processor alone decides"
_RANKS = "train.global_batch_size: of one rank; theirs is that times the ranks"
_PACKED = "theirs packs without masks, so that conversations see each other; here each sees itself"
_CUT = "theirs cuts each turn by its share, here the end of the row"


class LlamaFactory:
    """Reads the YAML or JSON of `llamafactory-cli train`."""

    tool = "LLaMA-Factory"

    def recognise(self, paths: Sequence[Path]) -> bool:
        """Whether one of these files, or of the files in these folders, is of LLaMA-Factory."""
        return bool(files_of(paths, _SUFFIXES, _is_factory))

    def migrate(self, paths: Sequence[Path]) -> Sequence[Migrated]:
        """A run for each file.

        Raises:
            ConfigError: a file is of another stage than supervised fine-tuning, or of another version.
        """
        runs = []
        for root in files_of(paths, _SUFFIXES, _is_factory):
            with checked(self.tool, root):
                runs.append(_of_factory(Source(root, _begun(root))))
        return runs


class TrainingArguments:
    """Reads a JSON of TrainingArguments, and the DeepSpeed JSON that it names or that lies beside it."""

    tool = "Transformers"

    def recognise(self, paths: Sequence[Path]) -> bool:
        """Whether one of these files, or of the files in these folders, holds TrainingArguments."""
        return bool(files_of(paths, (".json",), _is_arguments))

    def migrate(self, paths: Sequence[Path]) -> Sequence[Migrated]:
        """A run for each JSON of TrainingArguments.

        Raises:
            MMError: a file cannot be read.
        """
        beside = files_of(paths, (".json",), lambda root: "zero_optimization" in root.value)
        files = [file_of(root) for root in beside]
        found = files_of(paths, (".json",), _is_arguments)
        runs = []
        for root in found:
            with checked(self.tool, root):
                runs.append(_of_arguments(Source(root, _begun(root)), files))
        return runs


def _is_factory(root: Node) -> bool:
    keys = root.value.keys()
    return bool(keys & {"finetuning_type", "stage", "template"} and "model_name_or_path" in keys) or (
        {"train_dataset", "model"} <= keys and "parallel" not in keys
    )


def _is_arguments(root: Node) -> bool:
    keys = root.value.keys()
    return (
        "output_dir" in keys
        and not _is_factory(root)
        and bool(keys & {"per_device_train_batch_size", "num_train_epochs", "lr_scheduler_type"})
    )


def _begun(root: Node) -> Migrated:
    file = file_of(root)
    run = Migrated(file.stem)
    for key, value in (("run.name", file.stem), ("engine.type", "fsdp2"), ("task.type", "pretrained")):
        run.set(key, value, file.name)
    return run


def _of_arguments(source: Source, beside: Sequence[Path]) -> Migrated:
    run, name = source.run, source.get("model_name_or_path")
    rows = tuple(row for row in LLAMA_FACTORY if row.theirs in ("model_name_or_path", "trust_remote_code"))
    apply((*rows, *ARGUMENTS), source.node, run)
    _task(source, str(name or ""))
    if name is None:
        run.set("task.from_pretrained", "model", "nowhere")
        run.todo.append("task: from_pretrained and auto_class, which the script of the training has")
    run.set("data.train.type", "conversations", "nowhere")
    run.set("data.train.sources.0.annotations", "data/conversations.jsonl", "nowhere")
    run.todo.append("data.train: the rows, which the script of the training has")
    source.fill("engine.recompute_modules", None, "gradient_checkpointing")
    _settle(source, beside)
    return run


def _of_factory(source: Source) -> Migrated:
    run, where = source.run, file_of(source.node).name
    if "train_dataset" in source.node.value:
        what = "this is the newer configuration of LLaMA-Factory (v1), which is not known here"
        raise ConfigError(what, where=where, accepted="the YAML with stage and finetuning_type")
    stage, kind = source.get("stage", "sft"), source.get("finetuning_type", "lora")
    if stage != "sft" or not source.get("do_train", True):
        accepted = "stage: sft, with do_train: true"
        raise ConfigError(
            f"the stage {stage!r} has no counterpart here", where=source.place("stage"), accepted=accepted
        )
    apply(LLAMA_FACTORY, source.node, run)
    source.set("task.type", "pretrained", "stage")
    name = f"{source.get('model_name_or_path')} {source.get('template', '')}"
    sees = _task(source, name)
    if kind not in ("lora", "full"):
        source.differ("finetuning_type", "known: lora, full; full is written in its place")
    if kind == "lora":
        _adapter(source)
    else:
        source.take_off("the whole model is trained", *[key for key in run.lines if ".adapters." in key])
    if sees:
        _freeze(source, kind == "lora", bool(_VISUAL.search(name)))
        source.differ("image_max_pixels", _SHRINKS)
    _data(source)
    if source.get("packing", False) and not source.get("neat_packing", False):
        source.set("data.train.packing", True, "packing")
        source.differ("packing", _PACKED)
    if "template" in source.node.value:
        run.todo.append("template: the model's own, see `mm data inspect`")
    length = run.lines["data.train.max_length"]
    run.set("data.train.max_length", length.value, length.place, _CUT)
    _settle(source, [])
    return run


def _task(source: Source, name: str) -> bool:
    """Sets the class of the model; whether it sees."""
    sees = bool(_SEES.search(name))
    auto = "AutoModelForImageTextToText" if sees else "AutoModelForCausalLM"
    source.set("task.auto_class", auto, "model_name_or_path")
    return sees


def _adapter(source: Source) -> None:
    start, run = "train.adapters.0", source.run
    if f"{start}.from" in run.lines:
        source.take_off("the files of the adapter decide", f"{start}.rank")
        return
    target = source.get("lora_target", "all")
    modules = "auto" if target == "all" else words(target)
    source.set(f"{start}.targets", modules, "lora_target", "by finetuning_type")
    source.fill(f"{start}.rank", 8, "lora_rank")
    alpha = 2.0 * run.lines[f"{start}.rank"].value
    source.take(f"{start}.alpha", "lora_alpha", alpha, "absent, twice the rank; ours is the rank")
    if source.get("pissa_init", False):
        count = source.get("pissa_iter", 16)
        source.set(f"{start}.init", "pissa" if count == -1 else "pissa_niter_16", "pissa_init")
        if count not in (-1, 16):
            source.differ("pissa_iter", "16 iterations, or the exact parts (-1)")


def _freeze(source: Source, adapted: bool, joined: bool) -> None:
    """Tower and projector are frozen unless the file has it otherwise."""
    keys = ("vision_tower", "multi_modal_projector", "language_model")
    tower, projector, language = (source.get(f"freeze_{key}", key != keys[2]) for key in keys)
    if adapted:
        if tower and source.run.lines.get("train.adapters.0.targets"):
            source.set(
                "train.adapters.0.exclude", [_TOWER[joined]], "freeze_vision_tower", "frozen, as theirs"
            )
        if not projector or language:
            path = "freeze_language_model" if language else "freeze_multi_modal_projector"
            source.differ(path, "adapters are in the repeated blocks: write train.adapters targets")
        return
    inner = [f"{_TOWER[joined]}.{name}" for name in ("patch_embed", "blocks")]
    paths = (inner if joined and not projector else [_TOWER[joined]]) if tower else []
    paths += [_PROJECTOR[joined]] if projector and not (joined and tower) else []
    paths += ["model.model.language_model"] if language else []
    if paths:
        source.set("train.freeze", paths, "freeze_vision_tower", "frozen, as theirs")


def _data(source: Source) -> None:
    source.set("data.train.type", "conversations", "dataset")
    _sources(source, "dataset", "data.train")
    if source.get("eval_dataset") is not None:
        source.set("data.validation.type", "conversations", "eval_dataset")
        _sources(source, "eval_dataset", "data.validation")
        for key in ("max_length", "packing", "system"):
            if line := source.run.lines.get(f"data.train.{key}"):
                source.run.set(f"data.validation.{key}", line.value, line.place, line.note)
        source.take("validation.every", "eval_steps", 500)


def _sources(source: Source, path: str, ours: str) -> None:
    """The files of data sets, by the file that describes them."""
    folder = str(source.get("dataset_dir", "data"))
    file = _found(f"{folder}/dataset_info.json", source)
    known = read_source(file) if file is not None else None
    if known is None:
        source.run.todo.append(f"{ours}.sources: {folder}/dataset_info.json is not there, so it was not read")
    for number, name in enumerate(words(source.get(path, []))):
        start, info = f"{ours}.sources.{number}", known.at(name) if known is not None else None
        entry = Source(info or Node({}, source.node.where, ""), source.run)
        named = entry.get("file_name", f"{name}.json")
        by, key = (source, path) if entry.get("file_name") is None else (entry, "file_name")
        by.set(f"{start}.annotations", str(PurePosixPath(folder) / str(named)), key)
        source.set(f"{start}.folder", str(source.get("media_dir", folder)), path)
        if known is None:
            continue
        apply(DATA_SET, known.holding({name: info} if info is not None else {}), source.run)
        why = ""
        if entry.get("file_name") is None:
            why = "no file of this name is in dataset_info.json: fetch it, and name its file"
        elif entry.get("formatting") is None:
            why = ROWS
        if why:
            source.run.differs.append(Left(source.place(path), name, name, why))


def _found(name: str, source: Source) -> Path | None:
    starts = (Path(), *file_of(source.node).resolve().parents)
    return next((start / name for start in starts if (start / name).is_file()), None)


def _settle(source: Source, beside: Sequence[Path]) -> None:
    """What only holds together with other keys."""
    run, output = source.run, PurePosixPath(str(source.get("output_dir", "runs/run")))
    source.set("run.dir", str(output.parent), "output_dir")
    source.set("run.name", output.name, "output_dir")
    if "train.steps" in run.lines:
        source.take_off("the steps count", "train.epochs")
    micro, count = run.lines["train.micro_batch_size"].value, source.get("gradient_accumulation_steps", 1)
    source.set("train.global_batch_size", micro * count, "gradient_accumulation_steps", "of one rank")
    run.todo.append(_RANKS)
    note = "theirs takes none off biases and norms"
    source.set("train.decay_norms_and_biases", False, "weight_decay", note)
    kind = next((kind for kind in ("bf16", "fp16") if source.get(kind, False)), None)
    if kind:
        source.set("engine.param_dtype", kind, kind)
    if warmup := source.get("warmup_steps", 0):
        source.set(f"lr_schedule.warmup_{'fraction' if warmup < 1 else 'steps'}", warmup, "warmup_steps")
        if warmup >= 1:
            source.take_off("the steps count", "lr_schedule.warmup_fraction")
    if run.lines.get("lr_schedule.warmup_fraction") and not run.lines["lr_schedule.warmup_fraction"].value:
        source.take_off("no warm-up", "lr_schedule.warmup_fraction")
    if rate := source.get("lr_scheduler_kwargs.min_lr_rate"):
        source.set(
            "lr_schedule.min_lr", rate * run.lines["optimizer.lr"].value, "lr_scheduler_kwargs.min_lr_rate"
        )
    if source.get("lr_scheduler_type", "linear") == "constant":
        source.take_off(
            "a constant rate has no warm-up there", "lr_schedule.warmup_fraction", "lr_schedule.warmup_steps"
        )
    if "train.adapters.0.targets" in run.lines and kind == "bf16":
        source.fill("train.base_dtype", "bf16", "bf16", "theirs loads the base in it")
    _engine(source, beside)
    settle(run)


def _engine(source: Source, beside: Sequence[Path]) -> None:
    """DeepSpeed's file as it is."""
    named, run = source.get("deepspeed"), source.run
    if isinstance(named, dict):
        source.set("engine.type", "deepspeed", "deepspeed")
        source.set("engine.settings", named, "deepspeed")
    elif file := _found(str(named), source) if named else next(iter(beside), None):
        source.set("engine.type", "deepspeed", "deepspeed")
        run.set("engine.config", str(file), source.place("deepspeed"), "as it is")
    elif named:
        source.differ("deepspeed", "this file is not there, so it was not read: the engine is fsdp2")
    if run.lines["engine.type"].value != "deepspeed":
        return
    why = "the file of DeepSpeed decides"
    source.take_off(why, *[key for key in run.lines if key.startswith("engine.") and key[7:] not in _OWN])
    source.set("task.loss", "plain", "deepspeed", "as stage 3 needs it")


_OWN = ("type", "config", "settings")
