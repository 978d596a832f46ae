"""The migration of ai-toolkit: each process of its YAML that trains."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mm_core.errors import ConfigError
from mm_core.interchange.migration import Migrated, apply
from mm_core.schema.nodes import Node
from mm_trainers import models
from mm_trainers.common import at, differ, files_of, model_name, place, rooted, take_off, value_at
from mm_trainers.tables.aitoolkit import JOB, PROCESS

_TRAINS = ("sd_trainer", "ui_trainer", "diffusion_trainer")
_WAN = {"wan21": None, "wan21_i2v": "wan2.1-i2v-14b-480p", "wan22_14b": "wan2.2-t2v-a14b"}
_WAN |= {"wan22_14b_i2v": "wan2.2-i2v-a14b", "wan22_5b": "wan2.2-ti2v-5b"}
_PIPELINES = {
    **{"flux": "FluxPipeline", "flex1": "FluxPipeline", "flux_kontext": "FluxKontextPipeline"},
    **dict.fromkeys(("flux2_klein_4b", "flux2_klein_9b"), "Flux2KleinPipeline"),
    **{"qwen_image": "QwenImagePipeline", "qwen_image_edit": "QwenImageEditPipeline"},
    **{"qwen_image_edit_plus": "QwenImageEditPlusPipeline", "zimage": "ZImagePipeline"},
    **{"krea2": "Krea2Pipeline", "sd3": "StableDiffusion3Pipeline"},
}
_FORMS = {
    **dict.fromkeys(("qfloat8", "float8"), "fp8"),
    **dict.fromkeys(("qint8", "int8", "uint8", "convrot8"), "int8"),
    **dict.fromkeys(("qint4", "int4", "uint4", "nf4"), "nf4"),
}
_DENSITIES = {"sigmoid": "logit_normal", "linear": "uniform"}
_SHIFTED = ("shift", "flux_shift", "lumina2_shift")
_NO_RANK = 10**9
_EVENLY = (
    "theirs takes frames evenly spaced over the whole clip, here they follow each other: set data.train.fps"
)
_SWITCH = "theirs trains the experts by turns; here each step draws a timestep, and high has the fewer ones"


class AiToolkit:
    """Reads the YAML or JSON of a job."""

    tool = "ai-toolkit"

    def recognise(self, paths: Sequence[Path]) -> bool:
        """Whether one of these files, or of the files in these folders, is a job of ai-toolkit."""
        return any(True for _ in files_of(paths, _SUFFIXES, _is_job))

    def migrate(self, paths: Sequence[Path]) -> Sequence[Migrated]:
        """A run for each process of the jobs.

        Raises:
            ConfigError: a process is no training, or its model has no counterpart.
        """
        return [
            _run(root, process)
            for root in files_of(paths, _SUFFIXES, _is_job)
            for process in root.items("config", "process")
        ]


_SUFFIXES = (".yaml", ".yml", ".json")


def _is_job(root: Node) -> bool:
    return "job" in root.value and bool(root.items("config", "process"))


def _run(root: Node, process: Node) -> Migrated:
    process = rooted(process, f"{process.path}.")
    kind = value_at(process, "type")
    if kind not in _TRAINS:
        raise ConfigError(
            f"a process of the type {kind!r} is no training that is known here",
            where=place(process, "type"),
            accepted=", ".join(_TRAINS),
        )
    run = Migrated(str(value_at(root, "config.name", Path(root.where).stem)))
    run.set("run.name", run.name, place(root, "config.name"))
    run.set("engine.type", "fsdp2", place(process, "type"))
    arch, name = _model(process, run)
    apply(JOB, root, run)
    apply(PROCESS, process, run)
    run.set("run.name", _file_name(str(run.lines["run.name"].value)), run.lines["run.name"].place)
    _density(process, run, arch)
    _batch(process, run)
    if value_at(process, "network") is not None:
        _adapter(process, run, _PIPELINES.get(arch))
        _base(process, run)
    elif value_at(process, "model.quantize", False):
        differ(run, process, "model.quantize", "all weights are trained, so none is quantised")
    _datasets(process, run, arch)
    _samples(process, run)
    _settle(process, run, name)
    return run


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name).strip("._") or "run"


def _model(process: Node, run: Migrated) -> tuple[str, str]:
    """Sets the parts of the model; its architecture, and its name."""
    name = value_at(process, "model.name_or_path", "")
    arch, _, tag = str(value_at(process, "model.arch", "")).partition(":")
    where = place(process, "model.arch" if arch else "model")
    if not arch:
        flags = [key for key, node in (process.at("model") or process).value.items() if node.value is True]
        arch = next((key.removeprefix("is_") for key in flags if key.startswith("is_")), "sd1")
        arch = {"v3": "sd3", "xl": "sdxl", "v2": "sd2"}.get(arch, arch)
    folder, where_name = model_name(name), place(process, "model.name_or_path")
    if arch in _WAN:
        preset = _WAN[arch]
        if arch == "wan21":
            size = (
                "1.3b"
                if "1.3b" in str(name).lower() or "1b" in tag
                else "14b"
                if "14b" in f"{name}{tag}".lower()
                else None
            )
            preset = f"wan2.1-t2v-{size}" if size else None
        elif arch == "wan21_i2v" and "720" in f"{name}{tag}":
            preset = "wan2.1-i2v-14b-720p"
        models.set_wan(run, preset, folder, where_name, _experts(process))
    elif arch in _PIPELINES:
        models.set_pipeline(run, folder, where_name)
    else:
        known = sorted({*_WAN, *_PIPELINES})
        raise ConfigError(
            f"the architecture {arch!r} has no counterpart here",
            where=where,
            accepted=", ".join(known),
            hint="other pipelines of flow matching are added by a recipe: docs/diffusers-family.md",
        )
    run.set("task.latents", "sample", "default of the tool", "a draw of the autoencoder's posterior")
    return arch, str(name)


def _experts(process: Node) -> str:
    high, low = (value_at(process, f"model.model_kwargs.train_{end}_noise", True) for end in ("high", "low"))
    return "both" if high and low else "high" if high else "low"


def _density(process: Node, run: Migrated, arch: str) -> None:
    kind, where = value_at(process, "train.timestep_type", "sigmoid"), place(process, "train.timestep_type")
    if kind in _DENSITIES:
        models.set_density(run, _DENSITIES[kind], 1.0, where)
        return
    shift: float | str = "sampling"
    if models.is_wan(run):
        shift = 3.0 if arch.startswith("wan21") else 5.0
    if kind not in _SHIFTED:
        why = "a density that task.scheduler.timesteps does not have; linear is written in its place"
        if kind == "weighted":
            why = "weights by timestep, of a table of theirs; linear without weights is written in its place"
        differ(run, process, "train.timestep_type", why)
        shift = 1.0
    models.set_density(run, "uniform", shift, where)


def _batch(process: Node, run: Migrated) -> None:
    size = value_at(process, "train.batch_size", 1)
    legacy = value_at(process, "train.gradient_accumulation_steps", 1)
    count = value_at(process, "train.gradient_accumulation", 1)
    where = place(process, "train.gradient_accumulation")
    if legacy > 1:
        where, count = place(process, "train.gradient_accumulation_steps"), legacy
        steps = run.lines["train.steps"]
        run.set(
            "train.steps", steps.value // legacy, steps.place, f"theirs counts {legacy} micro-batches a step"
        )
    run.set("train.global_batch_size", size * count, where, "of one rank, as theirs")


def _adapter(process: Node, run: Migrated, pipeline: str | None) -> None:
    kind, start = value_at(process, "network.type", "lora"), "train.adapters.0"
    if str(kind).lower() not in ("lora", "locon", "lokr"):
        differ(run, process, "network.type", "known: lora, lokr; lora is written in its place")
    lokr = str(kind).lower() == "lokr"
    run.set(f"{start}.kind", "lokr" if lokr else "lora", place(process, "network.type"))
    only = value_at(process, "network.network_kwargs.only_if_contains")
    if f"{start}.from" in run.lines:
        for key in ("rank", "alpha"):
            take_off(run, f"{start}.{key}", "the file of the adapter decides")
        return
    path = "network.network_kwargs.only_if_contains" if only else "network.type"
    targets = [_module(each) for each in only or ()] or models.block_targets(run, pipeline)
    run.set(
        f"{start}.targets",
        targets,
        place(process, path),
        "" if only else "as theirs: linear layers of blocks",
    )
    if skipped := value_at(process, "network.network_kwargs.ignore_if_contains"):
        run.set(
            f"{start}.exclude", [_module(each) for each in skipped], place(process, "network.network_kwargs")
        )
    for key, theirs, default in (("rank", "linear", 4), ("alpha", "linear_alpha", 1.0)):
        if f"{start}.{key}" not in run.lines:
            run.set(f"{start}.{key}", default, f"default of the tool for network.{theirs}")
    if lokr:
        if value_at(process, "network.lokr_full_rank", True):
            where = place(process, "network.lokr_full_rank")
            for key in ("rank", "alpha"):
                run.set(f"{start}.{key}", _NO_RANK, where, "whole factors")
        factor = value_at(process, "network.lokr_factor", -1)
        if factor > 0:
            run.set(f"{start}.decompose_factor", factor, place(process, "network.lokr_factor"))


def _module(text: str) -> str:
    """The path of a module here, from a part of its name there."""
    name = str(text).replace("$$", ".").strip(".").removeprefix("transformer.")
    return f"predictor.{name}" if re.search(r"blocks\.\d+|layers\.\d+", name) else name


def _base(process: Node, run: Migrated) -> None:
    """The form of the frozen weights, and where they wait."""
    dtype = run.lines["engine.param_dtype"]
    if not value_at(process, "model.quantize", False):
        if dtype.value == "bf16":
            run.set("train.base_dtype", "bf16", dtype.place, "theirs keeps the base in train.dtype")
    else:
        form, _, recovery = str(value_at(process, "model.qtype", "qfloat8")).partition("|")
        path = "model.qtype" if at(process, "model.qtype") is not None else "model.quantize"
        ours = _FORMS.get(form)
        run.set("train.base_dtype", ours or "nf4", place(process, path), "rounded in another way than theirs")
        if ours is None:
            differ(run, process, "model.qtype", f"{form} is no form here; nf4 is written in its place")
        if recovery:
            differ(run, process, "model.qtype", "the adapter that takes quantisation back is not applied")
    for key in ("model.layer_offloading", "model.auto_memory"):
        if value_at(process, key, False):
            run.set("engine.base.stream", True, place(process, key))


def _datasets(process: Node, run: Migrated, arch: str) -> None:
    run.set("data.train.type", "media_text", place(process, "datasets"))
    count = len(process.items("datasets"))
    if not count:
        run.set("data.train.sources.0.annotations", "data/photos", "nowhere")
        run.todo.append("data.train.sources: the pictures or clips, which no key names")
    rates = [value_at(process, f"datasets.{i}.caption_dropout_rate", 0.0) for i in range(count)] or [0.0]
    where = place(process, "datasets.0.caption_dropout_rate")
    run.set("task.caption_dropout", max(rates), where, "of the task here, for all sources")
    if len(set(rates)) > 1:
        why = "one share for all sources here: the largest is written"
        differ(run, process, f"datasets.{rates.index(min(rates))}.caption_dropout_rate", why)
    _sizes(process, run, count)
    _frames(process, run, count, arch)
    word = value_at(process, "trigger_word", "")
    for number in range(max(count, 1)):
        key = f"data.train.sources.{number}.caption_prefix"
        if key in run.lines:
            own = run.lines[key]
            run.set(key, f"{own.value} ", own.place, own.note)
        elif word:
            run.set(key, f"{word} ", place(process, "trigger_word"), "before every caption")
    if word or any(key.endswith("caption_prefix") for key in run.lines):
        run.todo.append(
            "captions: take the trigger word and [trigger] out of them, since here each one gets it"
        )
    cached = ("cache_latents", "cache_latents_to_disk", "cache_text_embeddings")
    paths = [f"datasets.{i}.{name}" for i in range(count) for name in cached] + [
        "train.cache_text_embeddings"
    ]
    if found := next((path for path in paths if value_at(process, path, False)), None):
        run.set("data.cache.dir", "cache", place(process, found), "`mm cache build` fills it before the run")


def _sizes(process: Node, run: Migrated, count: int) -> None:
    """Buckets of one area: the largest resolution."""
    found: list[tuple[int, str]] = []
    for path in [f"datasets.{i}.resolution" for i in range(count)] or ["datasets.0.resolution"]:
        value = value_at(process, path, 512)
        found += [(int(side), path) for side in (value if isinstance(value, list) else [value])]
    side, path = max(found, key=lambda item: item[0])
    for key in ("max_height", "max_width"):
        run.set(f"data.train.{key}", side, place(process, path), "the area of a square of this side")
    run.set(
        "data.loader.mode", "variable", place(process, path), "buckets keep the aspect; nothing is enlarged"
    )
    if len({each for each, _ in found}) > 1:
        why = "theirs trains each picture at each size; here at the largest that it fills"
        differ(run, process, path, why)


def _frames(process: Node, run: Migrated, count: int, arch: str) -> None:
    frames = [value_at(process, f"datasets.{i}.num_frames", 1) for i in range(count)] or [1]
    most = frames.index(max(frames))
    run.set("data.train.num_frames", frames[most], place(process, f"datasets.{most}.num_frames"))
    clips = [number for number, each in enumerate(frames) if each > 1]
    for number in clips:
        if value_at(process, f"datasets.{number}.shrink_video_to_frames", True):
            differ(run, process, f"datasets.{number}.num_frames", _EVENLY)
        else:
            path = f"datasets.{number}.fps"
            run.set("data.train.fps", float(value_at(process, path, 24)), place(process, path))
            run.set("data.train.random_start", True, place(process, path), "theirs begins at a random frame")
    if models.is_wan(run):
        _whole_latents(run)
    if arch == "wan22_5b":
        first = [number for number in range(count) if value_at(process, f"datasets.{number}.do_i2v", False)]
        path = f"datasets.{first[0] if first else 0}.do_i2v"
        run.set("task.frames", ["first"] if first else [], place(process, path))


def _whole_latents(run: Migrated) -> None:
    """Frames that Wan's latents hold: theirs leaves out the last ones of a clip, and samples a few more."""
    for key, more in (("data.train.num_frames", -1), ("task.sample.num_frames", 0)):
        line = run.lines.get(key)
        if line and (whole := max(line.value + more, 0) // 4 * 4 + 1) != line.value and line.value > 1:
            run.set(key, whole, line.place, f"of {line.value}: what Wan's latents hold")


def _samples(process: Node, run: Migrated) -> None:
    items: list[Any] = value_at(process, "sample.samples") or []
    items = items or [{"prompt": text} for text in value_at(process, "sample.prompts", [])]
    word = str(value_at(process, "trigger_word", ""))
    prompts = [str(each["prompt"]).replace("[trigger]", word) for each in items if each.get("prompt")]
    if not prompts or value_at(process, "train.disable_sampling", False):
        for key in [key for key in run.lines if key.startswith(("validation.", "task.sample."))]:
            take_off(run, key, "no sample is made")
        return
    path = "sample.samples" if value_at(process, "sample.samples") else "sample.prompts"
    run.set("validation.samples.prompts", prompts, place(process, path))
    images = [each.get("ctrl_img") for each in items]
    if all(images):
        run.set("validation.samples.images", images, place(process, path))
    if negative := value_at(process, "sample.neg"):
        run.set("validation.samples.negative_prompt", str(negative), place(process, "sample.neg"))
    for key, theirs, default in (
        *(("validation.every", "sample_every", 100), ("task.sample.width", "width", 512)),
        *(("task.sample.height", "height", 512), ("validation.samples.steps", "sample_steps", 20)),
        *(("validation.samples.guidance", "guidance_scale", 7.0), ("validation.samples.seed", "seed", 0)),
    ):
        if key not in run.lines:
            run.set(key, default, f"default of the tool for sample.{theirs}")
    if "validation.at_start" not in run.lines:
        run.set("validation.at_start", True, "default of the tool for train.skip_first_sample")


def _settle(process: Node, run: Migrated, name: str) -> None:
    """Lines that only hold together with others."""
    if value_at(process, "train.ema_config.use_ema", False):
        path = "train.ema_config.ema_decay"
        run.set("ema.decay", float(value_at(process, path, 0.999)), place(process, path))
        run.set("ema.ramp", False, place(process, path), "their average has no ramp")
    if value_at(process, "train.lr_scheduler") == "constant_with_warmup":
        path = "train.lr_scheduler_params.num_warmup_steps"
        run.set("lr_schedule.warmup_steps", value_at(process, path, 1000), place(process, path))
    optimizer = run.lines.setdefault("optimizer.type", run.lines["engine.type"])
    if optimizer is run.lines["engine.type"]:
        run.set("optimizer.type", "adamw", place(process, "train.optimizer"), "in the place of theirs")
    if optimizer.value == "adamw_8bit":
        run.todo.append(
            'optimizer adamw_8bit: pip install "mm-core[low-bit]"; blocks of torchao, not bitsandbytes'
        )
    run.lines.setdefault("lr_schedule.type", run.lines["engine.type"])
    if run.lines["lr_schedule.type"].value == "fsdp2":
        run.set(
            "lr_schedule.type", "constant", place(process, "train.lr_scheduler"), "in the place of theirs"
        )
    if value_at(process, "logging.use_wandb", False):
        run.set("log.trackers", ["wandb"], place(process, "logging.use_wandb"))
    if run.lines.get("task.predictor.train") and run.lines["task.predictor.train"].value == "both":
        differ(run, process, "train.switch_boundary_every", _SWITCH)
    if not name:
        run.todo.append("task: the folder of the model, which no key names")
