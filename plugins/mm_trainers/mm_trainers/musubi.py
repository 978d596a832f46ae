"""The migration of musubi-tuner: a script with the flags of a training, and the TOML of its datasets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mm_core.errors import ConfigError, MMError, plural
from mm_core.interchange import Left, Migrated, Node, Program, Script, apply, read_script, read_source
from mm_trainers import models
from mm_trainers.common import Source, checked, file_of, files_of, found, inside, settle, warm_up
from mm_trainers.rows import Rows
from mm_trainers.tables.musubi import DATASETS, FLAGS, LAUNCHER, NETWORK, ONE, PIPELINE, TWO, WAN, WHOLE
from mm_trainers.values import listed

_TRAINS = re.compile(r"(?:.*[/\\])?(\w+?)_train(_network)?\.py")
_MARKS = rb"\b(?:wan|hv|hv_1_5|fpack|qwen_image|flux_kontext|flux_2|zimage|krea2|kandinsky5)_train\w*\.py"
_SOURCES = ("image_directory", "video_directory", "image_jsonl_file", "video_jsonl_file")
_WAN = {
    **{"t2v-1.3B": "Wan2.1-T2V-1.3B", "t2v-14B": "Wan2.1-T2V-14B", "t2i-14B": "Wan2.1-T2V-14B"},
    **{"i2v-14B": "Wan2.1-I2V-14B-480P", "flf2v-14B": "Wan2.1-FLF2V-14B-720P"},
    **{"t2v-A14B": "Wan2.2-T2V-A14B", "i2v-A14B": "Wan2.2-I2V-A14B"},
}
"""A task -> the model's name, which is our preset in small letters."""
_EDGES = {"wan2.2-t2v-a14b": 0.875, "wan2.2-i2v-a14b": 0.9}
_FLUX, _HUNYUAN = "black-forest-labs/FLUX.", "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p"
_PIPELINES = {
    **{"qwen_image": "Qwen/Qwen-Image", "qwen_image edit": "Qwen/Qwen-Image-Edit"},
    **{f"qwen_image edit-{date}": f"Qwen/Qwen-Image-Edit-{date}" for date in (2509, 2511)},
    **{f"flux_2 klein-{size}": f"{_FLUX}2-klein-{size.upper()}" for size in ("4b", "9b")},
    **{f"flux_2 klein-base-{size}": f"{_FLUX}2-klein-base-{size.upper()}" for size in ("4b", "9b")},
    **{f"hv_1_5 {kind}": f"{_HUNYUAN}_{kind}" for kind in ("t2v", "i2v")},
    **{"zimage": "Tongyi-MAI/Z-Image", "krea2": "krea/Krea-2-Raw"},
    "flux_kontext": f"{_FLUX}1-Kontext-dev",
}
"""A script, with its version or task -> the pipeline's name on the hub."""
_SHARED = {"resolution": [960, 544], "enable_bucket": False, "bucket_no_upscale": False, "batch_size": 1}
_SQUEEZED = "theirs squeezes the density between the bounds, here it is cut: --preserve_distribution_shape"
_FRAMES = "theirs takes a clip of each of these lengths from every video, here the longest that it has"
_FULL = "clips go to buckets of these frames, their half, their quarter"
_BROKEN = "a line of flags after one that does not end with a backslash: the command has none of them"


class MusubiTuner:
    """Reads a script that starts a training, and the TOML of its datasets."""

    tool = "musubi-tuner"
    keys = (*NETWORK, *FLAGS, *DATASETS)

    def recognise(self, paths: Sequence[Path]) -> bool:
        """Whether one of these files, or of the files in these folders, is of musubi-tuner."""
        return bool([*_scripts(paths)] or files_of(paths, (".toml",), _is_datasets))

    def migrate(self, paths: Sequence[Path]) -> Sequence[Migrated]:
        """A run for each training that the scripts start.

        Raises:
            MMError: no script is there, a file cannot be read, or a model has no counterpart.
        """
        tomls = files_of(paths, (".toml",), _is_datasets)
        runs = []
        for script in map(read_script, _scripts(paths)):
            for program in script.programs():
                if match := _TRAINS.fullmatch(program.name.text):
                    with checked(self.tool, program.flags):
                        runs.append(_run(script, program, match, tomls))
        if not runs:
            hint = "give the script with the flags of the training too: mm migrate dataset.toml train.sh"
            where = ", ".join(map(str, paths))
            raise MMError("no script here starts a training of musubi-tuner", where=where, hint=hint)
        return runs


def _scripts(paths: Sequence[Path]) -> Iterator[Path]:
    for file in inside(paths, ".sh", ".txt"):
        with suppress(OSError):
            if re.search(_MARKS, file.read_bytes()):
                yield file


def _is_datasets(root: Node) -> bool:
    return any(item.at(name) is not None for item in root.items("datasets") for name in _SOURCES)


def _run(script: Script, program: Program, match: re.Match[str], tomls: Sequence[Node]) -> Migrated:
    run, adapted = Migrated(script.path.stem), bool(match[2])
    flags, where = Source(_apart(program.flags), run), f"{script.path.name}:{program.name.line}"
    run.set("engine.type", "fsdp2", where)
    run.set("run.name", run.name, where)
    rows = _wan(flags) if match[1] == "wan" else _pipeline(match[1], flags, where)
    apply(LAUNCHER, program.launcher, run)
    run.world = int(Source(program.launcher, run).get("--num_processes", 1))
    run.launch += f" --nproc {run.world}" if run.world > 1 else ""
    apply((*rows, *(NETWORK if adapted else WHOLE), *FLAGS), flags.node, run)
    for each in script.unrun:
        if each.line < program.name.line and each.sets:
            run.differs.append(Left(f"{script.path.name}:{each.line}", each.text, "", each.why))
    for first in (words[0] for words in script.commands if words[0].text.startswith("--")):
        run.differs.append(Left(f"{script.path.name}:{first.line}", first.text, "", _BROKEN))
    _bounds(flags)
    warm_up(flags, "--lr_warmup_steps")
    if adapted:
        _adapter(flags, match[1])
    _data(Source(_datasets(flags, script.path, tomls), run), flags)
    settle(flags)
    return run


def _apart(flags: Node) -> Node:
    """The flags with `key=value` arguments as keys below theirs."""
    for name in ("--optimizer_args", "--network_args"):
        if (node := flags.at(name)) is not None:
            each = {}
            for child in node.children or [node]:
                key, _, value = str(child.value).partition("=")
                each[key] = replace(child, value=value, path=f"{name}.{key}")
            flags = flags.put(name, node.holding(each))
    return flags


def _datasets(flags: Source, near: Path, tomls: Sequence[Node]) -> Node:
    if (file := found(str(flags.get("--dataset_config", "")), near)) is not None:
        return read_source(file)
    if len(tomls) == 1:
        return tomls[0]
    flags.differ("--dataset_config", "this file is not there, so it was not read")
    return Node({}, str(near), "")


def _pipeline(script: str, flags: Source, where: str) -> Rows:
    """Sets the pipeline; the rows of flags that only such runs have."""
    old = "edit" if flags.get("--edit") else "edit-2509" if flags.get("--edit_plus") else ""
    version = flags.get("--task", "t2v") if script == "hv_1_5" else flags.get("--model_version", old)
    name = f"{script} {version}".strip().removesuffix(" original")
    if name not in _PIPELINES:
        accepted = f"wan, {', '.join(_PIPELINES)}"
        raise ConfigError(f"the model {name!r} has no counterpart here", where=where, accepted=accepted)
    folder = _PIPELINES[name]
    models.set_pipeline(flags.run, f"hub:{folder}", flags.place("--dit"))
    why = f"the weights as a folder of Diffusers, as in hub:{folder}; theirs are other layouts"
    flags.run.todo.append(f"task.pipeline: {why}")
    return PIPELINE


def _wan(flags: Source) -> Rows:
    """Sets the parts of Wan; the rows of flags that only such runs have."""
    task, run = flags.get("--task", "t2v-14B"), flags.run
    if task not in _WAN:
        what, accepted = f"the task {task!r} has no counterpart here", ", ".join(_WAN)
        raise ConfigError(what, where=flags.place("--task"), accepted=accepted)
    name, preset = _WAN[task], _WAN[task].lower()
    both, pair = flags.get("--dit_high_noise") is not None, preset in models.PAIRS
    train = "both" if both else "high" if flags.get("--min_timestep", 0) >= 500 else "low"
    models.set_wan(run, preset, f"hub:Wan-AI/{name}-Diffusers", flags.place("--task"), train)
    if pair:
        why = "a folder with both experts; each of their files is one"
        run.todo.append(f"task.predictor.from_pretrained: {why}")
    if flags.get("--t5") is not None:
        flags.set("task.text_encoder.tokenizer", "hub:google/umt5-xxl", "--t5", "as theirs")
    run.set("task.latents", "mode", "default of the tool", "the mean of the autoencoder's posterior")
    return TWO if pair and both else WAN if pair else ONE


def _bounds(flags: Source) -> None:
    """Their bounds are timesteps from clean, after the shift; ours are shares of the levels, from noise."""
    low, high = flags.get("--min_timestep", 0) / 1000, flags.get("--max_timestep", 1000) / 1000
    bound, lines = "--min_timestep" if low else "--max_timestep", flags.run.lines
    if (low, high) == (0, 1):
        return
    if not models.is_wan(flags.run):
        flags.differ(bound, "this scheduler has no bounds")
        return
    edge, trained = _EDGES.get(lines["task.predictor.preset"].value), lines.get("task.predictor.train")
    if edge in (low, high) and trained is not None and trained.value != "both":
        why = "the expert's own share of the timesteps, by task.predictor.boundary"
        flags.run.dropped.append(Left(flags.place(bound), bound, flags.get(bound), why))
    else:
        shift = lines["task.scheduler.shift"].value
        for ours, flag, time in (("min", "--max_timestep", high), ("max", "--min_timestep", low)):
            share = round(1 - time / (shift - (shift - 1) * time), 6)
            flags.set(f"task.scheduler.{ours}_timestep_boundary", share, flag, "counted from noise")
    if not flags.get("--preserve_distribution_shape", False):
        flags.differ(bound, _SQUEEZED)


def _adapter(flags: Source, script: str) -> None:
    run, swap = flags.run, "--blocks_to_swap"
    targets: str | list[str] = "auto"
    if script in ("wan", "flux_kontext", "flux_2", "zimage"):
        targets = models.block_targets(run, script)
    if script == "zimage":
        targets = [f"{targets[0]}.{part}" for part in ("attention", "feed_forward")]
    flags.set("train.adapters.0.targets", targets, "--network_module", "as theirs: linear layers of blocks")
    if swapped := flags.get(swap, 0):
        flags.set("engine.base.stream", True, swap)
        if not flags.get("--gradient_checkpointing"):
            flags.set("engine.recompute_modules", "auto", swap, "streamed blocks are recomputed")
        if models.is_wan(run):
            count = 30 if "1.3b" in run.lines["task.predictor.preset"].value else 40
            flags.set("engine.base.keep", max(count - swapped, 1), swap, f"of {count} blocks")


def _data(data: Source, flags: Source) -> None:
    run = data.run
    apply(DATASETS, data.node, run)
    data.node = _merged(data.node)
    every = [f"datasets.{number}" for number in range(len(data.node.items("datasets")))]
    flags.set("data.train.type", "media_text", "--dataset_config", file_of(data.node).name)
    run.set("task.caption_dropout", 0.0, "default of the tool", "it drops no captions")
    run.set("data.cache.dir", "cache", "theirs caches")
    for number, each in enumerate(every):
        start = f"data.train.sources.{number}"
        for kind in ("image", "video"):
            if data.get(path := f"{each}.{kind}_jsonl_file") is not None:
                data.set(f"{start}.columns.path", f"{kind}_path", path)
                data.set(f"{start}.columns.caption", "caption", path)
        if (repeats := data.get(path := f"{each}.num_repeats", 1)) != 1:
            data.set(f"{start}.weight", float(repeats), path)
    if not every:
        run.set("data.train.sources.0.annotations", "data/clips", "nowhere")
        run.todo.append("data.train.sources: the pictures or clips, which no file names")
    first = {}
    for name, default in _SHARED.items():
        values = [(data.get(path := f"{each}.{name}", default), path) for each in every or ["general"]]
        first[name] = values[0]
        if odd := next((path for value, path in values if value != values[0][0]), None):
            data.differ(odd, "one value for all sources here: that of the first is written")
    buckets, path = first["enable_bucket"]
    if buckets:
        data.set("data.loader.mode", "variable", path, "buckets keep the aspect")
        data.set("data.loader.upscale", not first["bucket_no_upscale"][0], first["bucket_no_upscale"][1])
    size, path = first["resolution"]
    for side, value in zip(("width", "height"), listed(size) * 2, strict=False):
        data.set(f"data.train.{'max_' if buckets else ''}{side}", value, path)
    _frames(data, every)
    size, path = first["batch_size"]
    data.set("train.micro_batch_size", size, path)
    steps = flags.get("--gradient_accumulation_steps", 1)
    note = f"{size} x {steps} accumulated x {plural(run.world, 'rank')} of --num_processes"
    flags.set("train.global_batch_size", size * steps * run.world, "--gradient_accumulation_steps", note)


def _merged(root: Node) -> Node:
    """The datasets with the keys of all of them, which are not theirs."""
    general, items = root.at("general"), root.items("datasets")
    shared = general.value if general is not None else {}
    return root.put("datasets", root.holding([each.holding({**shared, **each.value}) for each in items]))


def _frames(data: Source, every: Sequence[str]) -> None:
    kinds = ("video_directory", "video_jsonl_file")
    videos = [each for each in every if any(data.get(f"{each}.{kind}") for kind in kinds)]
    most, path = 1, "datasets.0.target_frames"
    for each in videos:
        full = data.get(f"{each}.frame_extraction") == "full"
        here = f"{each}.{'max_frames' if full else 'target_frames'}"
        most, path = max((most, path), data.largest([here], 129 if full else 1))
        if full or len(listed(data.get(here, 1))) > 1:
            data.differ(here, _FULL if full else _FRAMES)
    whole = models.whole_frames(most)
    data.set("data.train.num_frames", whole, path, f"of {most}: what latents hold" if whole != most else "")
    given = [f"{each}.source_fps" for each in videos if data.get(f"{each}.source_fps") is not None]
    if given:
        rate = 16.0 if models.is_wan(data.run) else 24.0
        data.set("data.train.fps", rate, given[0], "frames are taken at the model's rate, as theirs")
        if len(given) < len(videos):
            data.differ(given[0], "one rate for all sources here; theirs takes every frame of the others")
    elif videos:
        data.set("data.train.fps", None, f"{videos[0]}.source_fps", "every frame is taken, as theirs")
