"""The migration of ai-toolkit: each process of its YAML that trains."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mm_core.errors import ConfigError
from mm_core.interchange import Migrated, Node, apply
from mm_trainers import models
from mm_trainers.common import Reader, Source, file_of, rooted, settle
from mm_trainers.tables.aitoolkit import JOB, PROCESS, SHIFTED
from mm_trainers.values import listed, model_name

_TRAINS = ("sd_trainer", "ui_trainer", "diffusion_trainer")
_WAN = {
    "wan21": {"1.3b": "wan2.1-t2v-1.3b", "14b": "wan2.1-t2v-14b"},
    "wan21_i2v": {"720": "wan2.1-i2v-14b-720p", "": "wan2.1-i2v-14b-480p"},
    "wan22_14b": {"": "wan2.2-t2v-a14b"},
    "wan22_14b_i2v": {"": "wan2.2-i2v-a14b"},
    "wan22_5b": {"": "wan2.2-ti2v-5b"},
}
"""Architecture -> the preset, by a part of the model's name."""
_PIPELINES: tuple[str, ...] = ("qwen_image", "qwen_image_edit", "qwen_image_edit_plus")
_PIPELINES += ("flux", "flex1", "flux_kontext", "flux2_klein_4b", "flux2_klein_9b", "zimage", "krea2", "sd3")
_OLD = {"is_flux": "flux", "is_v3": "sd3", "is_xl": "sdxl", "is_v2": "sd2", "is_lumina2": "lumina2"}
_NO_RANK = 10**9
_EVENLY = "theirs takes frames evenly spaced over the clip, here they follow each other: set data.train.fps"
_SWITCH = "theirs trains the experts by turns; here each step draws a timestep, and high has the fewer ones"


class AiToolkit(Reader):
    """Reads the YAML or JSON of a job."""

    tool = "ai-toolkit"
    suffixes = (".yaml", ".yml", ".json")
    keys = (*JOB, *PROCESS)

    def is_one(self, root: Node) -> bool:
        return "job" in root.value and bool(root.items("config", "process"))

    def runs(self, root: Node, paths: Sequence[Path]) -> list[Migrated]:
        """A run for each process; a ConfigError where one is no training, or its model has no counterpart."""
        return [_run(root, process) for process in root.items("config", "process")]


def _run(root: Node, process: Node) -> Migrated:
    run = Migrated("")
    source = Source(rooted(process, f"{process.path}."), run)
    kind, where = source.get("type"), source.place("type")
    if kind not in _TRAINS:
        what = f"a process of the type {kind!r} is no training that is known here"
        raise ConfigError(what, where=where, accepted=", ".join(_TRAINS))
    run.set("run.name", file_of(root).stem, where)
    run.set("engine.type", "fsdp2", where, f"job: {root.value['job'].value}")
    arch = _model(source)
    apply(JOB, root, run)
    apply(PROCESS, source.node, run)
    shift: float | str = 1.0
    if source.get("train.timestep_type") in SHIFTED:
        wan = 3.0 if arch.startswith("wan21") else 5.0
        shift = wan if models.is_wan(run) else "sampling"
    source.set("task.scheduler.shift", shift, "train.timestep_type", "ours is 5" * models.is_wan(run))
    if source.get("network") is not None:
        _adapter(source, arch)
    _datasets(source, arch)
    _samples(source)
    settle(source)
    return run


def _model(source: Source) -> str:
    """Sets the parts of the model; its architecture."""
    name, run, where = str(source.get("model.name_or_path", "")), source.run, "model.name_or_path"
    arch, _, tag = str(source.get("model.arch", "")).partition(":")
    named = "model.arch" if arch else "model"
    arch = arch or next((old for flag, old in _OLD.items() if source.get(f"model.{flag}")), "sd1")
    if arch in _WAN:
        text = f"{name} {tag}".lower()
        preset = next((preset for part, preset in _WAN[arch].items() if part in text), None)
        ends = [end for end in ("high", "low") if source.get(f"model.model_kwargs.train_{end}_noise", True)]
        train = ends[0] if len(ends) == 1 else "both"
        models.set_wan(run, preset, model_name(name), source.place(where), train)
        if preset in models.PAIRS and train == "both":
            source.differ("train.switch_boundary_every", _SWITCH)
    elif arch in _PIPELINES:
        models.set_pipeline(run, model_name(name), source.place(where))
    else:
        what, accepted = f"the architecture {arch!r} has no counterpart here", ", ".join([*_WAN, *_PIPELINES])
        hint = 'other pipelines of flow matching are added by a recipe: the page "Add a Diffusers family"'
        raise ConfigError(what, where=source.place(named), accepted=accepted, hint=hint)
    source.set("task.type", run.lines["task.type"].value, "model.arch")
    run.set("task.latents", "sample", "default of the tool", "a draw of the autoencoder's posterior")
    return arch


def _adapter(source: Source, arch: str) -> None:
    start, run = "train.adapters.0", source.run
    only, skip = (f"network.network_kwargs.{name}_if_contains" for name in ("only", "ignore"))
    targets = _modules(source, only) or models.block_targets(run, arch)
    source.set(f"{start}.targets", targets, only, "as theirs: linear layers of blocks")
    if skipped := _modules(source, skip):
        source.set(f"{start}.exclude", skipped, skip)
    if run.lines[f"{start}.kind"].value == "lokr" and source.get("network.lokr_full_rank", True):
        for key in ("rank", "alpha"):
            source.set(f"{start}.{key}", _NO_RANK, "network.lokr_full_rank", "whole factors")


def _modules(source: Source, path: str) -> list[str]:
    """The paths of modules here, from parts of their names there."""
    names = [str(name).replace("$$", ".").strip(".") for name in source.get(path, [])]
    start = "predictor." if models.is_wan(source.run) else "predictor.transformer."
    found = [name.removeprefix("transformer.") for name in names]
    return [f"{start}{name}" if re.match(r"\w*(blocks|layers)\.\d", name) else name for name in found]


def _datasets(source: Source, arch: str) -> None:
    run, count = source.run, len(source.node.items("datasets"))
    source.set("data.train.type", "media_text", "datasets")
    if not count:
        run.set("data.train.sources.0.annotations", "data/photos", "nowhere")
        run.todo.append("data.train.sources: the pictures or clips, which no key names")
    every = [f"datasets.{number}" for number in range(max(count, 1))]
    rates = [f"{each}.caption_dropout_rate" for each in every]
    rate, path = source.largest(rates, 0.0)
    source.set("task.caption_dropout", rate, path, "of the task here, for all sources")
    if any(source.get(each, 0.0) != rate for each in rates):
        source.differ(path, "one share for all sources here: the largest is written")
    for number, each in enumerate(every):
        here = next((p for p in (f"{each}.trigger_word", "trigger_word") if source.get(p)), None)
        if here is not None:
            key = f"data.train.sources.{number}.caption_prefix"
            source.set(key, f"{source.get(here)} ", here, "before every caption")
        if count and source.get(f"{each}.default_caption") is None:
            what = "theirs uses files without a caption"
            source.set(f"data.train.sources.{number}.caption", "", each, what)
    if any(key.endswith(".caption_prefix") for key in run.lines):
        run.todo.append("captions: take the trigger word and [trigger] out of them; here each one gets it")
    sizes = [f"{each}.resolution" for each in every]
    side, path = source.largest(sizes, 512)
    for key in ("max_height", "max_width"):
        source.set(f"data.train.{key}", int(side), path, "the area of a square of this side")
    source.set("data.loader.mode", "variable", path, "buckets keep the aspect; nothing is enlarged")
    if any(each != side for size in sizes for each in listed(source.get(size, 512))):
        source.differ(path, "theirs trains each picture at each size; here at the largest that it fills")
    _frames(source, every, arch)


def _frames(source: Source, every: Sequence[str], arch: str) -> None:
    most, path = source.largest([f"{each}.num_frames" for each in every], 1)
    for each in (each for each in every if source.get(f"{each}.num_frames", 1) > 1):
        if source.get(f"{each}.shrink_video_to_frames", True):
            source.differ(f"{each}.num_frames", _EVENLY)
        else:
            source.set("data.train.fps", source.get(f"{each}.fps", 24), f"{each}.fps")
            source.set("data.train.random_start", True, f"{each}.fps", "theirs begins at a random frame")
    source.set("data.train.num_frames", most, path)
    for key, more in (("data.train.num_frames", 0), ("task.sample.num_frames", 1)):
        line = source.run.lines.get(key) if models.is_wan(source.run) else None
        if line and line.value > 1 and (whole := models.whole_frames(line.value + more)) != line.value:
            source.run.set(key, whole, line.place, f"of {line.value}: what Wan's latents hold")
    if arch == "wan22_5b":
        first = next((f"{each}.do_i2v" for each in every if source.get(f"{each}.do_i2v")), None)
        source.set("task.frames", ["first"] if first else [], first or "datasets.0.do_i2v")


def _samples(source: Source) -> None:
    path = "sample.samples" if source.get("sample.samples") else "sample.prompts"
    items = [each if isinstance(each, dict) else {"prompt": each} for each in source.get(path, [])]
    word = str(source.get("trigger_word", ""))
    texts = [str(each["prompt"]).replace("[trigger]", word) for each in items if each.get("prompt")]
    prompts = [re.split(r"\s+--\w", text)[0] for text in texts]  # flags of one prompt: sizes, seeds, pictures
    if not prompts or source.get("train.disable_sampling"):
        source.take_off("no sample is made", "validation.", "task.sample.")
        return
    source.set("validation.samples.prompts", prompts, path)
    if all(images := [each.get("ctrl_img") for each in items]):
        source.set("validation.samples.images", images, path)
