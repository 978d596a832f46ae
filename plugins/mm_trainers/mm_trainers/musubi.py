"""The migration of musubi-tuner: a script with the flags of a training, and the TOML of its datasets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mm_core.errors import ConfigError, MMError, plural
from mm_core.interchange import Left, Migrated, Node, Program, Script, apply, read_script, read_source
from mm_trainers import models
from mm_trainers.common import Source, checked, file_of, files_of, inside, settle
from mm_trainers.tables.musubi import DATASETS, FLAGS, LAUNCHER

_TRAINS = re.compile(r"(?:.*[/\\])?(\w+?)_train(_network)?\.py")
_MARKS = re.compile(
    rb"\b(?:wan|hv|hv_1_5|fpack|qwen_image|flux_kontext|flux_2|zimage|krea2|kandinsky5)_train(?:_network)?\.py"
)
_SOURCES = ("image_directory", "video_directory", "image_jsonl_file", "video_jsonl_file")
_WAN = {
    "t2v-1.3B": ("wan2.1-t2v-1.3b", "Wan2.1-T2V-1.3B"),
    "t2v-14B": ("wan2.1-t2v-14b", "Wan2.1-T2V-14B"),
    "t2i-14B": ("wan2.1-t2v-14b", "Wan2.1-T2V-14B"),
    "i2v-14B": ("wan2.1-i2v-14b-480p", "Wan2.1-I2V-14B-480P"),
    "flf2v-14B": ("wan2.1-flf2v-14b-720p", "Wan2.1-FLF2V-14B-720P"),
    "t2v-A14B": ("wan2.2-t2v-a14b", "Wan2.2-T2V-A14B"),
    "i2v-A14B": ("wan2.2-i2v-a14b", "Wan2.2-I2V-A14B"),
}
_EDGE = "--timestep_boundary"
_EDGES = {"wan2.2-t2v-a14b": 0.875, "wan2.2-i2v-a14b": 0.9}
_OLD = {"--edit": "edit", "--edit_plus": "edit-2509"}
_PIPELINES = {
    "qwen_image": ("QwenImagePipeline", "Qwen/Qwen-Image"),
    "qwen_image edit": ("QwenImageEditPipeline", "Qwen/Qwen-Image-Edit"),
    "qwen_image edit-2509": ("QwenImageEditPlusPipeline", "Qwen/Qwen-Image-Edit-2509"),
    "qwen_image edit-2511": ("QwenImageEditPlusPipeline", "Qwen/Qwen-Image-Edit-2511"),
    "zimage": ("ZImagePipeline", "Tongyi-MAI/Z-Image"),
    "krea2": ("Krea2Pipeline", "krea/Krea-2-Raw"),
    "flux_kontext": ("FluxKontextPipeline", "black-forest-labs/FLUX.1-Kontext-dev"),
    "flux_2 klein-base-4b": ("Flux2KleinPipeline", "black-forest-labs/FLUX.2-klein-base-4B"),
    "flux_2 klein-4b": ("Flux2KleinPipeline", "black-forest-labs/FLUX.2-klein-4B"),
    "flux_2 klein-base-9b": ("Flux2KleinPipeline", "black-forest-labs/FLUX.2-klein-base-9B"),
    "flux_2 klein-9b": ("Flux2KleinPipeline", "black-forest-labs/FLUX.2-klein-9B"),
    **{
        f"hv_1_5 {kind}": (name, f"hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_{kind}")
        for kind, name in (
            ("t2v", "HunyuanVideo15Pipeline"),
            ("i2v", "HunyuanVideo15ImageToVideoPipeline"),
        )
    },
}
"""A script, with its version or task -> the pipeline, and its name on the hub."""
_DENSITIES = {
    **{"uniform": "uniform", "sigmoid": "logit_normal", "shift": "logit_normal"},
    **{"none": "uniform", "logit_normal": "logit_normal", "mode": "mode"},
    **{"sigma_sqrt": "uniform", "cosmap": "uniform"},
}
_BY_SIZE = ("flux_shift", "flux2_shift", "qwen_shift", "krea2_shift")
_SHARED = {"resolution": [960, 544], "enable_bucket": False, "bucket_no_upscale": False, "batch_size": 1}
_SQUEEZED = "theirs squeezes the density between the bounds, here it is cut: --preserve_distribution_shape"
_FRAMES = "theirs takes a clip of each of these lengths from every video, here the longest that it has"
_FULL = "clips go to buckets of these frames, their half, their quarter"


class MusubiTuner:
    """Reads a script that starts a training, and the TOML of its datasets."""

    tool = "musubi-tuner"

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
            if _MARKS.search(file.read_bytes()):
                yield file


def _is_datasets(root: Node) -> bool:
    return any(item.at(name) is not None for item in root.items("datasets") for name in _SOURCES)


def _run(script: Script, program: Program, match: re.Match[str], tomls: Sequence[Node]) -> Migrated:
    run = Migrated(script.path.stem)
    flags = Source(program.flags, run)
    where = f"{script.path.name}:{program.name.line}"
    run.set("engine.type", "fsdp2", where)
    run.set("run.name", run.name, where)
    pipeline = _model(match[1], flags, where)
    if program.launcher is not None:
        apply(LAUNCHER, program.launcher, run)
        run.world = int(Source(program.launcher, run).get("--num_processes", 1))
        run.launch += f" --nproc {run.world}" if run.world > 1 else ""
    apply(FLAGS, program.flags, run)
    for each in script.unrun:
        if each.line < program.name.line and each.sets:
            run.differs.append(Left(f"{script.path.name}:{each.line}", each.text, "", each.why))
    for first in (words[0] for words in script.commands if words[0].text.startswith("--")):
        why = "a line of flags after one that does not end with a backslash: the command has none of them"
        run.differs.append(Left(f"{script.path.name}:{first.line}", first.text, "", why))
    _density(flags)
    _optimizer(flags)
    _checkpoints(flags)
    if match[2]:
        _adapter(flags, pipeline)
    else:
        flags.take_off("the whole model is trained", *[key for key in run.lines if ".adapters." in key])
    _base(flags, adapted=bool(match[2]))
    _data(Source(_datasets(flags, script.path, tomls), run), flags)
    settle(run)
    return run


def _datasets(flags: Source, near: Path, tomls: Sequence[Node]) -> Node:
    named = str(flags.get("--dataset_config", ""))
    folders = (Path(), *near.resolve().parents)
    file = next((folder / named for folder in folders if (folder / named).is_file()), None)
    if file is not None:
        return read_source(file)
    if len(tomls) == 1:
        return tomls[0]
    flags.differ("--dataset_config", "this file is not there, so it was not read")
    return Node({}, str(near), "")


def _model(script: str, flags: Source, where: str) -> str | None:
    """Sets the parts of the model; the class of its pipeline, but for Wan."""
    if script == "wan":
        _wan(flags)
        return None
    old = next((version for flag, version in _OLD.items() if flags.get(flag, False)), "")
    version = flags.get("--task", "t2v") if script == "hv_1_5" else flags.get("--model_version", old)
    name = f"{script} {version}".strip().removesuffix(" original")
    if name not in _PIPELINES:
        accepted = f"wan, {', '.join(_PIPELINES)}"
        raise ConfigError(f"the model {name!r} has no counterpart here", where=where, accepted=accepted)
    pipeline, folder = _PIPELINES[name]
    models.set_pipeline(flags.run, f"hub:{folder}", flags.place("--dit"))
    why = f"the weights as a folder of Diffusers, as in hub:{folder}; theirs are other layouts"
    flags.run.todo.append(f"task.pipeline: {why}")
    return pipeline


def _wan(flags: Source) -> None:
    task, run = flags.get("--task", "t2v-14B"), flags.run
    if task not in _WAN:
        what, accepted = f"the task {task!r} has no counterpart here", ", ".join(_WAN)
        raise ConfigError(what, where=flags.place("--task"), accepted=accepted)
    preset, name = _WAN[task]
    pair, folder = preset in models.PAIRS, f"hub:Wan-AI/{name}-Diffusers"
    both = flags.get("--dit_high_noise") is not None
    if (edge := flags.get(_EDGE)) is not None and pair and both:
        flags.set("task.predictor.boundary", edge / 1000 if edge > 1 else edge, _EDGE)
    elif edge is not None:
        flags.drop(_EDGE, "it is read only where both experts are trained")
    alone = "high" if flags.get("--min_timestep", 0) >= 500 else "low"
    models.set_wan(run, preset, folder, flags.place("--task"), "both" if both else alone)
    if pair:
        run.todo.append(
            "task.predictor.from_pretrained: a folder with both experts; each of their files is one"
        )
    for part, flag in (("predictor", "--dit"), ("autoencoder", "--vae"), ("text_encoder", "--t5")):
        if (file := flags.get(flag)) is not None and not (pair and flag == "--dit"):
            flags.set(f"task.{part}.from_pretrained", str(file), flag)
            if flag == "--t5":
                flags.set("task.text_encoder.tokenizer", "hub:google/umt5-xxl", flag, "as theirs")
    if "-t2v-" not in preset and not pair:
        run.set("task.image_encoder.from_pretrained", f"{folder}/image_encoder", flags.place("--clip"))
    run.set("task.latents", "mode", "default of the tool", "the mean of the autoencoder's posterior")


def _density(flags: Source) -> None:
    path, wan = "--timestep_sampling", models.is_wan(flags.run)
    kind, scheme = flags.get(path, "sigma"), flags.get("--weighting_scheme", "none")
    density, note = _DENSITIES.get(scheme if kind == "sigma" else kind), ""
    shift = flags.get("--discrete_flow_shift", 1.0) if kind in ("sigma", "shift") else 1.0
    if kind in _BY_SIZE and not wan:
        density, shift, note = "logit_normal", "sampling", "by the size of the picture, as in sampling"
    if density is None or (density == "mode" and not wan):
        flags.differ(path, "a density without a counterpart; uniform is written in its place")
        density = "uniform"
    models.set_density(flags.run, density, shift, flags.place(path), note)
    if kind in ("sigma", "shift"):
        flags.set("task.scheduler.shift", shift, "--discrete_flow_shift", "ours is 5" if wan else "")
    if scheme in ("sigma_sqrt", "cosmap"):
        flags.differ("--weighting_scheme", "no weight of the loss by timestep like this one")
    names = {"logit_mean": "--logit_mean", "logit_std": "--logit_std", "mode_scale": "--mode_scale"}
    for key, flag in (names if kind == "sigma" else {"logit_std": "--sigmoid_scale"}).items():
        if flags.get(flag) is not None and key.startswith(density.partition("_")[0]):
            flags.take(f"task.scheduler.{key}", flag, None)
    _bounds(flags)


def _bounds(flags: Source) -> None:
    """Their bounds are timesteps from clean, after the shift; ours are shares of the levels, from noise."""
    low, high = flags.get("--min_timestep", 0) / 1000, flags.get("--max_timestep", 1000) / 1000
    bound, run = "--min_timestep" if low else "--max_timestep", flags.run
    if (low, high) == (0, 1):
        return
    if not models.is_wan(run):
        flags.differ(bound, "this scheduler has no bounds")
        return
    edge = _EDGES.get(run.lines["task.predictor.preset"].value)
    trained = run.lines.get("task.predictor.train")
    if edge in (low, high) and trained is not None and trained.value != "both":
        why = "the expert's own share of the timesteps, by task.predictor.boundary"
        flags.drop(bound, why)
    else:
        shift = run.lines["task.scheduler.shift"].value
        for ours, flag, time in (("min", "--max_timestep", high), ("max", "--min_timestep", low)):
            share = round(1 - time / (shift - (shift - 1) * time), 6)
            flags.set(f"task.scheduler.{ours}_timestep_boundary", share, flag, "counted from noise")
    if not flags.get("--preserve_distribution_shape", False):
        flags.differ(bound, _SQUEEZED)


def _checkpoints(flags: Source) -> None:
    """They keep those of the last steps, here is how many."""
    path = "--save_last_n_steps"
    every, last = flags.get("--save_every_n_steps"), flags.get(path)
    if last is not None and every:
        flags.set("checkpoint.keep", last // every + 1, path, f"theirs keeps the last {plural(last, 'step')}")
    elif last is not None:
        flags.drop(path, "it does nothing without save_every_n_steps")


def _optimizer(flags: Source) -> None:
    run = flags.run
    run.set("optimizer.weight_decay", 0.01, "default of the tool for --optimizer_args")
    for text in map(str, models.listed(flags.get("--optimizer_args", []))):
        key, _, value = text.partition("=")
        numbers = re.findall(r"[\d.]+(?:e-?\d+)?", value)
        if key in ("weight_decay", "eps", "betas") and len(numbers) == (2 if key == "betas" else 1):
            found = [float(number) for number in numbers]
            flags.set(f"optimizer.{key}", found if key == "betas" else found[0], "--optimizer_args")
        else:
            why = "an argument of the optimizer without a counterpart"
            run.differs.append(Left(flags.place("--optimizer_args"), key, text, why))
    if warmup := flags.get("--lr_warmup_steps"):
        flags.set(f"lr_schedule.warmup_{'fraction' if warmup < 1 else 'steps'}", warmup, "--lr_warmup_steps")
    if ratio := flags.get("--lr_scheduler_min_lr_ratio"):
        rate = run.lines["optimizer.lr"].value
        flags.set("lr_schedule.min_lr", rate * ratio, "--lr_scheduler_min_lr_ratio", "of the rate")
    if flags.get("--lr_scheduler") != "polynomial":
        flags.take_off("of the schedule polynomial alone", "lr_schedule.power")
    if flags.get("--max_train_epochs") is not None:
        run.lines.pop("train.steps", None)
        flags.take("train.epochs", "--max_train_epochs", None)


def _adapter(flags: Source, pipeline: str | None) -> None:
    start, module, run = "train.adapters.0", "--network_module", flags.run
    kind = str(flags.get(module, "")).rpartition(".")[2]
    flags.set(f"{start}.kind", kind if kind in ("loha", "lokr") else "lora", module)
    if not kind.startswith(("lora", "loha", "lokr")):
        flags.differ(module, "known: lora_*, loha, lokr; lora is written in its place")
    for text in map(str, models.listed(flags.get("--network_args", []))):
        key, _, value = text.partition("=")
        name = {"loraplus_lr_ratio": "b_lr_scale"}.get(key) or ("decompose_factor" if key == "factor" else "")
        if name and value.replace(".", "", 1).isdigit() and (key != "factor" or kind == "lokr"):
            number = int(value) if key == "factor" else float(value)
            flags.set(f"{start}.{name}", number, "--network_args")
        else:
            why = "an argument of the adapter without a counterpart"
            run.differs.append(Left(flags.place("--network_args"), key, text, why))
    if f"{start}.from" in run.lines:
        flags.take_off("the file of the adapter decides", f"{start}.rank", f"{start}.alpha")
        return
    targets: object = "auto"
    if pipeline == "ZImagePipeline":
        targets = [
            f"{path}.{part}" for path in models.BLOCKS[pipeline] for part in ("attention", "feed_forward")
        ]
    elif pipeline is None or pipeline.startswith("Flux"):
        targets = models.block_targets(run, pipeline)
    flags.set(f"{start}.targets", targets, module, "as theirs: linear layers of blocks")
    flags.fill(f"{start}.rank", 4, "--network_dim")
    flags.fill(f"{start}.alpha", 1.0, "--network_alpha")


def _base(flags: Source, adapted: bool) -> None:
    run, swap = flags.run, "--blocks_to_swap"
    fp8 = next((flag for flag in ("--fp8_scaled", "--fp8_base") if flags.get(flag, False)), None)
    if fp8 and adapted:
        flags.set("train.base_dtype", "fp8", fp8, "a scale for each row")
    elif adapted and (dtype := run.lines.get("engine.param_dtype")) and dtype.value == "bf16":
        run.set("train.base_dtype", "bf16", dtype.place, "theirs keeps the base in it")
    if not (swapped := flags.get(swap, 0)):
        return
    if not adapted:
        flags.differ(swap, "only a frozen base is streamed: engine.offload has other ways")
        return
    flags.set("engine.base.stream", True, swap)
    flags.fill("engine.recompute_modules", "auto", swap, "streamed blocks are recomputed")
    if models.is_wan(run):
        count = 30 if "1.3b" in run.lines["task.predictor.preset"].value else 40
        flags.set("engine.base.keep", max(count - swapped, 1), swap, f"of {count} blocks")


def _data(data: Source, flags: Source) -> None:
    run, every = data.run, [f"datasets.{number}" for number in range(len(data.node.items("datasets")))]
    apply(DATASETS, data.node, run)
    flags.set("data.train.type", "media_text", "--dataset_config", file_of(data.node).name)
    run.set("task.caption_dropout", 0.0, "default of the tool", "it drops no captions")
    run.set("data.cache.dir", "cache", "theirs caches")
    run.set("data.cache.missing", "encode", "theirs caches", "or `mm cache build` fills it before the run")
    for number, each in enumerate(every):
        start = f"data.train.sources.{number}"
        for kind in ("image", "video"):
            if (table := data.get(path := f"{each}.{kind}_jsonl_file")) is not None:
                data.set(f"{start}.annotations", str(table), path)
                data.set(f"{start}.columns.path", f"{kind}_path", path)
                data.set(f"{start}.columns.caption", "caption", path)
        if (repeats := _given(data, each, "num_repeats", 1))[0] != 1:
            data.set(f"{start}.weight", float(repeats[0]), repeats[1])
    if not every:
        run.set("data.train.sources.0.annotations", "data/clips", "nowhere")
        run.todo.append("data.train.sources: the pictures or clips, which no file names")
    values = {
        name: [_given(data, each, name, default) for each in every] for name, default in _SHARED.items()
    }
    for found in values.values():
        if odd := next((path for value, path in found if value != found[0][0]), None):
            data.differ(odd, "one value for all sources here: that of the first is written")
    first = {name: (found or [(_SHARED[name], f"general.{name}")])[0] for name, found in values.items()}
    buckets, path = first["enable_bucket"]
    if buckets:
        data.set("data.loader.mode", "variable", path, "buckets keep the aspect")
        data.set("data.loader.upscale", not first["bucket_no_upscale"][0], first["bucket_no_upscale"][1])
    size, path = first["resolution"]
    for side, value in zip(
        ("width", "height"), size if isinstance(size, list) else (size, size), strict=False
    ):
        data.set(f"data.train.{'max_' if buckets else ''}{side}", value, path)
    _frames(data, every)
    size, path = first["batch_size"]
    data.set("train.micro_batch_size", size, path)
    steps = flags.get("--gradient_accumulation_steps", 1)
    note = f"{size} x {steps} accumulated x {plural(run.world, 'rank')} of --num_processes"
    flags.set("train.global_batch_size", size * steps * run.world, "--gradient_accumulation_steps", note)


def _given(data: Source, each: str, name: str, default: object) -> tuple[Any, str]:
    """A value of a dataset, else that of all of them, and its path."""
    path = next((p for p in (f"{each}.{name}", f"general.{name}") if data.node_at(p) is not None), "")
    return (data.get(path, default), path) if path else (default, f"general.{name}")


def _frames(data: Source, every: Sequence[str]) -> None:
    videos = [
        each
        for each in every
        if any(data.get(f"{each}.video_{kind}") for kind in ("directory", "jsonl_file"))
    ]
    most, path = 1, "datasets.0.target_frames"
    for each in videos:
        full = data.get(f"{each}.frame_extraction") == "full"
        here = f"{each}.{'max_frames' if full else 'target_frames'}"
        frames = models.listed(data.get(here, 129 if full else 1))
        most, path = max((most, path), (max(frames), here))
        if full or len(frames) > 1:
            data.differ(here, _FULL if full else _FRAMES)
    whole = (most - 1) // 4 * 4 + 1
    data.set("data.train.num_frames", whole, path, f"of {most}: what latents hold" if whole != most else "")
    given = [f"{each}.source_fps" for each in videos if data.get(f"{each}.source_fps") is not None]
    if given:
        rate = 16.0 if models.is_wan(data.run) else 24.0
        data.set("data.train.fps", rate, given[0], "frames are taken at the model's rate, as theirs")
        if len(given) < len(videos):
            data.differ(given[0], "one rate for all sources here; theirs takes every frame of the others")
    elif videos:
        data.set("data.train.fps", None, f"{videos[0]}.source_fps", "every frame is taken, as theirs")
