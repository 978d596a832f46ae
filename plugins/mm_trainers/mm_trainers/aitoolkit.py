"""The migration of ai-toolkit: each process of its YAML that trains."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mm_core.errors import ConfigError
from mm_core.interchange import Migrated, Node, apply
from mm_trainers import models
from mm_trainers.common import Source, checked, file_of, files_of, model_name, rooted, settle
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
_OLD = {"flux": "flux", "v3": "sd3", "xl": "sdxl", "v2": "sd2", "lumina2": "lumina2"}


class AiToolkit:
    """Reads the YAML or JSON of a job."""

    tool = "ai-toolkit"

    def recognise(self, paths: Sequence[Path]) -> bool:
        """Whether one of these files, or of the files in these folders, is a job of ai-toolkit."""
        return bool(files_of(paths, _SUFFIXES, _is_job))

    def migrate(self, paths: Sequence[Path]) -> Sequence[Migrated]:
        """A run for each process of the jobs.

        Raises:
            ConfigError: a process is no training, or its model has no counterpart.
        """
        jobs = files_of(paths, _SUFFIXES, _is_job)
        runs = []
        for root in jobs:
            with checked(self.tool, root):
                runs += [_run(root, process) for process in root.items("config", "process")]
        return runs


_SUFFIXES = (".yaml", ".yml", ".json")


def _is_job(root: Node) -> bool:
    return "job" in root.value and bool(root.items("config", "process"))


def _run(root: Node, process: Node) -> Migrated:
    name = root.at("config", "name")
    run = Migrated(str(name.value) if name is not None else file_of(root).stem)
    source = Source(rooted(process, f"{process.path}."), run)
    kind, where = source.get("type"), source.place("type")
    if kind not in _TRAINS:
        what = f"a process of the type {kind!r} is no training that is known here"
        raise ConfigError(what, where=where, accepted=", ".join(_TRAINS))
    run.set("run.name", run.name, where)
    run.set("engine.type", "fsdp2", where, f"job: {root.value['job'].value}")
    arch = _model(source)
    apply(JOB, root, run)
    apply(PROCESS, source.node, run)
    _density(source, arch)
    _steps(source)
    if source.get("network") is not None:
        _adapter(source, _PIPELINES.get(arch))
        _base(source)
    elif source.get("model.quantize", False):
        source.differ("model.quantize", "all weights are trained, so none is quantised")
    _datasets(source, arch)
    _samples(source)
    settle(run)
    return run


def _model(source: Source) -> str:
    """Sets the parts of the model; its architecture."""
    name = str(source.get("model.name_or_path", ""))
    arch, _, tag = str(source.get("model.arch", "")).partition(":")
    where = source.place("model.arch" if arch else "model")
    if not arch:
        flags = source.node_at("model") or source.node
        found = [key.removeprefix("is_") for key, node in flags.value.items() if node.value is True]
        arch = next((_OLD[key] for key in found if key in _OLD), "sd1")
    if arch in _WAN:
        preset, text = _WAN[arch], f"{name} {tag}".lower()
        if arch == "wan21":
            preset = next((f"wan2.1-t2v-{size}" for size in ("1.3b", "14b") if size in text), None)
        elif arch == "wan21_i2v" and "720" in text:
            preset = "wan2.1-i2v-14b-720p"
        high, low = (source.get(f"model.model_kwargs.train_{end}_noise", True) for end in ("high", "low"))
        experts = "both" if high and low else "high" if high else "low"
        models.set_wan(source.run, preset, model_name(name), source.place("model.name_or_path"), experts)
        if preset in models.PAIRS and experts == "both":
            source.differ("train.switch_boundary_every", _SWITCH)
    elif arch in _PIPELINES:
        models.set_pipeline(source.run, model_name(name), source.place("model.name_or_path"))
    else:
        what, accepted = f"the architecture {arch!r} has no counterpart here", ", ".join([*_WAN, *_PIPELINES])
        hint = "other pipelines of flow matching are added by a recipe: docs/diffusers-family.md"
        raise ConfigError(what, where=where, accepted=accepted, hint=hint)
    source.run.set("task.type", source.run.lines["task.type"].value, where)
    source.run.set("task.latents", "sample", "default of the tool", "a draw of the autoencoder's posterior")
    return arch


def _density(source: Source, arch: str) -> None:
    path = "train.timestep_type"
    kind = source.get(path, "sigmoid")
    shift: float | str = 1.0
    if kind in _SHIFTED:
        wan = 3.0 if arch.startswith("wan21") else 5.0
        shift = wan if models.is_wan(source.run) else "sampling"
    elif kind not in _DENSITIES:
        source.differ(path, "no such density or weight; linear without weights is written in its place")
    models.set_density(source.run, _DENSITIES.get(kind, "uniform"), shift, source.place(path))


def _steps(source: Source) -> None:
    """Samples of a step, warm-up and the average."""
    path, run = "train.gradient_accumulation", source.run
    if (legacy := source.get(f"{path}_steps", 1)) > 1:
        path = f"{path}_steps"
        note = f"theirs counts the {legacy} micro-batches of a step"
        run.set("train.steps", run.lines["train.steps"].value // legacy, source.place(path), note)
    count = source.get("train.batch_size", 1) * source.get(path, 1)
    source.set("train.global_batch_size", count, path, "of one rank, as theirs")
    if source.get("train.lr_scheduler") == "constant_with_warmup":
        source.take("lr_schedule.warmup_steps", "train.lr_scheduler_params.num_warmup_steps", 1000)
    if source.get("train.ema_config.use_ema", False):
        source.take("ema.decay", "train.ema_config.ema_decay", 0.999)
        source.set("ema.ramp", False, "train.ema_config.use_ema", "their average has no ramp")
    if source.get("logging.use_wandb", False):
        source.set("log.trackers", ["wandb"], "logging.use_wandb")


def _adapter(source: Source, pipeline: str | None) -> None:
    kind, start = str(source.get("network.type", "lora")).lower(), "train.adapters.0"
    if kind not in ("lora", "locon", "lokr"):
        source.differ("network.type", "known: lora, lokr; lora is written in its place")
    source.set(f"{start}.kind", "lokr" if kind == "lokr" else "lora", "network.type")
    if f"{start}.from" in source.run.lines:
        source.take_off("the file of the adapter decides", f"{start}.rank", f"{start}.alpha")
        return
    only, skip = (f"network.network_kwargs.{name}_if_contains" for name in ("only", "ignore"))
    wan = models.is_wan(source.run)
    targets = _modules(source.get(only, []), wan) or models.block_targets(source.run, pipeline)
    source.set(f"{start}.targets", targets, only, "as theirs: linear layers of blocks")
    if skipped := source.get(skip):
        source.set(f"{start}.exclude", _modules(skipped, wan), skip)
    source.fill(f"{start}.rank", 4, "network.linear")
    source.fill(f"{start}.alpha", 1.0, "network.linear_alpha")
    if kind == "lokr":
        if source.get("network.lokr_full_rank", True):
            for key in ("rank", "alpha"):
                source.set(f"{start}.{key}", _NO_RANK, "network.lokr_full_rank", "whole factors")
        if (factor := source.get("network.lokr_factor", -1)) > 0:
            source.set(f"{start}.decompose_factor", factor, "network.lokr_factor")


def _modules(names: Sequence[str], wan: bool) -> list[str]:
    """The paths of modules here, from parts of their names there."""
    found = [str(name).replace("$$", ".").strip(".").removeprefix("transformer.") for name in names]
    start = "predictor" if wan else "predictor.transformer"
    return [f"{start}.{name}" if re.match(r"\w*(blocks|layers)\.\d", name) else name for name in found]


def _base(source: Source) -> None:
    """The form of the frozen weights, and where they wait."""
    dtype = source.run.lines["engine.param_dtype"]
    if source.get("model.quantize", False):
        path = "model.qtype"
        form, _, recovery = str(source.get(path, "qfloat8")).partition("|")
        source.set("train.base_dtype", _FORMS.get(form, "nf4"), path, "rounded in another way than theirs")
        if form not in _FORMS:
            source.differ(path, f"{form} is no form here; nf4 is written in its place")
        if recovery:
            source.differ(path, "the adapter that takes quantisation back is not applied")
    elif dtype.value == "bf16":
        source.run.set("train.base_dtype", "bf16", dtype.place, "theirs keeps the base in train.dtype")
    for key in ("model.layer_offloading", "model.auto_memory"):
        if source.get(key, False):
            source.set("engine.base.stream", True, key)


def _datasets(source: Source, arch: str) -> None:
    run, count = source.run, len(source.node.items("datasets"))
    source.set("data.train.type", "media_text", "datasets")
    if not count:
        run.set("data.train.sources.0.annotations", "data/photos", "nowhere")
        run.todo.append("data.train.sources: the pictures or clips, which no key names")
    every = [f"datasets.{number}" for number in range(max(count, 1))]
    rates = [source.get(f"{each}.caption_dropout_rate", 0.0) for each in every]
    path = f"{every[rates.index(max(rates))]}.caption_dropout_rate"
    source.set("task.caption_dropout", max(rates), path, "of the task here, for all sources")
    if len(set(rates)) > 1:
        source.differ(path, "one share for all sources here: the largest is written")
    _sizes(source, every)
    _frames(source, every, arch)
    for number in range(len(every)):
        key = f"data.train.sources.{number}.caption_prefix"
        word = run.lines[key].value if key in run.lines else source.get("trigger_word", "")
        path = f"datasets.{number}.trigger_word" if key in run.lines else "trigger_word"
        if word:
            source.set(key, f"{word} ", path, "before every caption")
    if any(key.endswith(".caption_prefix") for key in run.lines):
        run.todo.append("captions: take the trigger word and [trigger] out of them; here each one gets it")
    names = ("cache_latents", "cache_latents_to_disk", "cache_text_embeddings")
    paths = [f"{each}.{name}" for each in every for name in names] + ["train.cache_text_embeddings"]
    if found := next((path for path in paths if source.get(path, False)), None):
        source.set("data.cache.dir", "cache", found)
        source.set("data.cache.missing", "encode", found, "or `mm cache build` fills it before the run")


def _sizes(source: Source, every: Sequence[str]) -> None:
    """Buckets of one area: the largest resolution."""
    values = {f"{each}.resolution": source.get(f"{each}.resolution", 512) for each in every}
    found = [(int(side), path) for path, value in values.items() for side in models.listed(value)]
    side, path = max(found, key=lambda item: item[0])
    for key in ("max_height", "max_width"):
        source.set(f"data.train.{key}", side, path, "the area of a square of this side")
    source.set("data.loader.mode", "variable", path, "buckets keep the aspect; nothing is enlarged")
    if len({each for each, _ in found}) > 1:
        source.differ(path, "theirs trains each picture at each size; here at the largest that it fills")


def _frames(source: Source, every: Sequence[str], arch: str) -> None:
    frames = [source.get(f"{each}.num_frames", 1) for each in every]
    most = every[frames.index(max(frames))]
    source.set("data.train.num_frames", max(frames), f"{most}.num_frames")
    for each, count in zip(every, frames, strict=True):
        if count > 1 and source.get(f"{each}.shrink_video_to_frames", True):
            source.differ(f"{each}.num_frames", _EVENLY)
        elif count > 1:
            source.take("data.train.fps", f"{each}.fps", 24)
            source.set("data.train.random_start", True, f"{each}.fps", "theirs begins at a random frame")
    if models.is_wan(source.run):
        for key, more in (("data.train.num_frames", -1), ("task.sample.num_frames", 0)):
            line = source.run.lines.get(key)
            if line and (whole := max(line.value + more, 0) // 4 * 4 + 1) != line.value and line.value > 1:
                source.run.set(key, whole, line.place, f"of {line.value}: what Wan's latents hold")
    if arch == "wan22_5b":
        first = [f"{each}.do_i2v" for each in every if source.get(f"{each}.do_i2v", False)]
        source.set("task.frames", ["first"] if first else [], first[0] if first else f"{most}.do_i2v")


def _samples(source: Source) -> None:
    items = source.get("sample.samples") or [{"prompt": text} for text in source.get("sample.prompts", [])]
    word = str(source.get("trigger_word", ""))
    texts = [str(each["prompt"]).replace("[trigger]", word) for each in items if each.get("prompt")]
    prompts = [re.split(r"\s+--\w", text)[0] for text in texts]  # flags of one prompt: sizes, seeds, pictures
    if not prompts or source.get("train.disable_sampling", False):
        keys = [key for key in source.run.lines if key.startswith(("validation.", "task.sample."))]
        source.take_off("no sample is made", *keys)
        return
    path = "sample.samples" if source.get("sample.samples") else "sample.prompts"
    source.set("validation.samples.prompts", prompts, path)
    if all(images := [each.get("ctrl_img") for each in items]):
        source.set("validation.samples.images", images, path)
    if negative := source.get("sample.neg"):
        source.set("validation.samples.negative_prompt", str(negative), "sample.neg")
    for key, theirs, default in (
        *(("validation.every", "sample_every", 100), ("validation.samples.steps", "sample_steps", 20)),
        *(("task.sample.height", "height", 512), ("task.sample.width", "width", 512)),
        ("validation.samples.guidance", "guidance_scale", 7.0),
    ):
        source.fill(key, default, f"sample.{theirs}")
    source.fill("validation.at_start", True, "train.skip_first_sample")
