"""Wan and HunyuanVideo 1.5: model.json and data.json as a task of clips."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mm_core.interchange import Key, Left, Migrated, Node, apply, place_of, read_source, to_python
from mm_mindspeed.begin import begin, load_of
from mm_mindspeed.files import Files, place_at, resolve, value_at
from mm_mindspeed.tables.converts import path
from mm_mindspeed.tables.data import DATA, RESIZES, P
from mm_mindspeed.tables.video import HUNYUAN, VIDEO

_SIZES = ("hidden_size", "num_layers", "ffn_dim", "in_dim", "out_dim")
_PRESETS = {
    (1536, 30, 8960, 16, 16, ""): "wan2.1-t2v-1.3b",
    (5120, 40, 13824, 16, 16, ""): "wan2.1-t2v-14b",
    (5120, 40, 13824, 36, 16, "i2v"): "wan2.1-i2v-14b-480p",
    (5120, 40, 13824, 36, 16, "flf2v"): "wan2.1-flf2v-14b-720p",
    (5120, 40, 13824, 36, 16, "wan2.2-i2v"): "wan2.2-i2v-a14b",
    (3072, 30, 14336, 48, 48, ""): "wan2.2-ti2v-5b",
}
"""Sizes and model_type -> the published model."""
_PUBLISHED: dict[str, Any] = {"patch_size": [1, 2, 2], "text_dim": 4096, "freq_dim": 256, "img_dim": 1280}
_PUBLISHED |= {"cross_attn_norm": True, "eps": 1e-6, "max_seq_len": 1024}
"""Sizes that all published models have."""
_OF_PAIRS = ("wan2.1-t2v-14b", "wan2.2-i2v-a14b")  # sizes of Wan 2.2's experts
_PAIRS = {"t2v": ("wan2.2-t2v-a14b", 0.875), "i2v": ("wan2.2-i2v-a14b", 0.9)}
_KEPT = [f"task.predictor.{name}" for name in ("type", "train", "boundary", "from_pretrained")]
_ENCODERS = "features that were extracted before; the encoders are those of the pipeline"
_REPLACED = "a clip that cannot be read is left out and counted; theirs takes another one at random"


def migrate_wan(files: Files, model: Node, run: Migrated) -> None:
    """A run of Wan 2.1 or 2.2."""
    run.set("task.type", "text_to_video", place_at(model, "task"))
    cached = bool(value_at(model, "load_video_features") or value_at(model, "load_text_features"))
    apply(VIDEO, model, run)
    encoders = _encoders(files, model, run) if cached else model
    pipeline = _pipeline(files, encoders)
    _predictor(files, model, pipeline, run)
    _clips(files, run, cached)
    if "task.image_encoder.type" in run.lines and "task.image_encoder.from_pretrained" not in run.lines:
        place = place_at(model, "predictor.model_type")
        run.set("task.image_encoder.from_pretrained", f"{pipeline}/image_encoder", place, _ENCODERS)


def _pipeline(files: Files, encoders: Node | None) -> str:
    """The folder of the pipeline: that of the autoencoder, else of the weights to begin with."""
    load = str(value_at(files.flags, "--load", "") or "").rstrip("/")
    own = str(value_at(encoders, "ae.from_pretrained", "") or "").rstrip("/")
    if load.endswith("/transformer") or not own.endswith("/vae"):
        return load.removesuffix("/transformer")
    return own.removesuffix("/vae")


def _encoders(files: Files, model: Node, run: Migrated) -> Node | None:
    """The file that features were extracted with, beside the example: its encoders are run here, over clips
    that are read as for the features. The order of samples stays that of the training."""
    folder = resolve("feature_extract", files.main)
    place = place_at(model, "load_video_features")
    run.set("data.cache.dir", "cache", place, "each clip is encoded once: their .pt files are not read")
    found = (folder or Path()) / f"model_{value_at(model, 'task', 't2v')}.json"
    encoders = read_source(found) if folder is not None and found.is_file() else None
    if encoders is None:
        run.todo.append(f"data.train.sources: the clips that the features were extracted from ({place})")
        run.set("task.autoencoder.type", "wan/vae", place, _ENCODERS)
        run.set("task.text_encoder.type", "wan/umt5", place, _ENCODERS)
    else:
        rows = [row for row in VIDEO if row.theirs.startswith(("ae.", "text_encoder.", "load_"))]
        apply([Key("task"), *rows], encoders, run)
    reading = found.with_name("data.json")
    if encoders is not None and files.data is not None and reading.is_file():
        why = f"of the features; the clips are read as {reading.parent.name}/{reading.name} has it"
        run.dropped.append(Left(place_at(files.data, "dataset_param"), "dataset_param", "...", why))
        loader, files.data = files.data.at("dataloader_param"), read_source(reading)
        files.data = files.data if loader is None else files.data.put("dataloader_param", loader)
    pipeline = _pipeline(files, encoders)
    for key, name in (
        ("autoencoder.from_pretrained", "vae"),
        ("text_encoder.from_pretrained", "text_encoder"),
        ("text_encoder.tokenizer", "tokenizer"),
    ):
        run.set(f"task.{key}", f"{pipeline}/{name}", place, _ENCODERS)
    return encoders


def _predictor(files: Files, model: Node, pipeline: str, run: Migrated) -> None:
    sizes, place = value_at(model, "predictor", {}), place_at(model, "predictor")
    low, high = (value_at(model, f"diffusion.{end}_timestep_boundary") for end in ("min", "max"))
    preset, expert = _preset(sizes), ""
    if bool(low) != (high not in (None, 1)) and preset in _OF_PAIRS:  # else the scheduler has both
        expert = "low" if low else "high"
        preset = _expert(model, expert, float(low or high), run)
    run.set("task.predictor.type", "wan/two_expert" if expert else "wan/transformer", place)
    if preset:
        for key in [key for key in run.lines if key.startswith("task.predictor.") and key not in _KEPT]:
            del run.lines[key]
        run.set("task.predictor.preset", preset, place, "has all of its sizes")
    elif "hidden_size" in sizes:
        width, where = sizes["hidden_size"], place_at(model, "predictor.hidden_size")
        run.set("task.predictor.attention_head_dim", width // sizes["num_heads"], where)
        if "task.predictor.image_dim" in run.lines:
            run.set("task.predictor.added_kv_proj_dim", width, where)
    _weights(files, model, pipeline, run, bool(preset or expert))


def _expert(model: Node, expert: str, share: float, run: Migrated) -> str | None:
    """Sets one expert of a pair, whose share of the levels is counted from noise; the published pair, if its
    boundary, a share of the timesteps, is meant."""
    place, shift = place_at(model, "diffusion"), float(value_at(model, "diffusion.shift", 3.0))
    preset, published = _PAIRS["i2v" if value_at(model, "predictor.in_dim") == 36 else "t2v"]
    sigma = shift * (1 - share) / (1 + (shift - 1) * (1 - share))
    same = abs(sigma - published) < 1e-3
    run.set("task.predictor.train", expert, place)
    run.set("task.predictor.boundary", published if same else round(sigma, 6), place)
    for key in ("engine.sub_modules_to_wrap", "engine.recompute_modules"):
        if (line := run.lines.get(key)) is not None and line.value != "auto":
            of_experts = [name.replace("predictor.", "predictor.{*}.", 1) for name in line.value]
            run.set(key, of_experts, line.place, "of the expert")
    for end in ("min", "max"):
        run.leave(f"task.scheduler.{end}_timestep_boundary", "task.predictor.boundary gives it")
    return preset if same else None


def _weights(files: Files, model: Node, pipeline: str, run: Migrated, whole: bool) -> None:
    """Where training begins: at the pipeline's transformer, or at weights of their own."""
    load = model.at("predictor", "from_pretrained")
    load = load if load is not None and load.value else load_of(files)
    if load is None:
        return
    text = path(to_python(load))
    found = re.fullmatch(r"(.*)/(transformer(?:_2)?|[^/]*convert[^/]*)", text)
    if found is not None and (found[2].startswith("transformer") or found[1] == pipeline):
        folder, part = found.groups()
        part = part if part.startswith("transformer") else "transformer"
        pair = run.lines["task.predictor.type"].value == "wan/two_expert"
        folder = folder if whole and (pair or part == "transformer") else f"{folder}/{part}"
        key = "task.predictor.from_pretrained" if whole else "init_from.path"
        run.set(key, folder, place_of(load), f"its weights are those that were converted to {text}")
        return
    begin(files, load, "", run)
    if pipeline and f"{text}/".startswith(f"{pipeline}/"):
        run.todo.append(
            f"init_from.path: {text} counts as weights of a training of your own; if they are the"
            f" published ones, set task.predictor.from_pretrained: {pipeline} in its place"
        )


def _preset(sizes: dict[str, Any]) -> str | None:
    """The published model that has these sizes; those of a first frame differ in how they look at it."""
    heads = sizes.get("num_heads", 0)
    others = all(sizes.get(name, value) == value for name, value in _PUBLISHED.items())
    if not others or (heads and sizes.get("hidden_size") != 128 * heads):
        return None
    key: Any = tuple(map(sizes.get, _SIZES))
    kind = sizes.get("model_type", "i2v" if sizes.get("in_dim") == 36 else "")
    return _PRESETS.get((*key, kind)) or _PRESETS.get((*key, ""))


def _clips(files: Files, run: Migrated, cached: bool = False) -> None:
    """data.json as a dataset of clips, and its loader."""
    run.leave("data.train.max_length", "clips have no tokens of their own")
    if files.data is None:
        run.todo.append("data.train.sources: the clips; the run's data.json is not there")
    data = files.data or files.flags.holding({})
    run.set("data.train.type", "media_text", place_at(data, "dataset_param.dataset_type"), _REPLACED)
    apply(DATA, data, run)
    if cached and (line := run.lines.get("data.train.random_start")) is not None and line.value:
        note = "theirs drew the beginning once, with the features; so does data.cache"
        run.set("data.train.random_start", True, line.place, note)
    if "data.train.max_height" in run.lines:
        place = place_at(data, f"{P}force_resolution")
        run.set("data.loader.mode", "variable", place, "buckets keep the aspect of clips, nearly")
        largest = run.lines["data.train.max_height"].value * run.lines["data.train.max_width"].value
        if (area := value_at(data, f"{P}max_hxw")) is not None:
            left = Left(place_at(data, f"{P}max_hxw"), f"{P}max_hxw", area, "buckets: max_height x max_width")
            (run.dropped if area == largest else run.differs).append(left)
    pipeline = data.at("dataset_param", "preprocess_parameters", "train_pipeline")
    for name in ("video", "video_and_first_frame", "video_only"):
        for stage in pipeline.items(name) if pipeline is not None else ():
            if value_at(stage, "trans_type") in RESIZES and not value_at(stage, "param.antialias", False):
                why = "frames are resized with antialiasing here; theirs is without it unless it is asked for"
                run.differs.append(Left(place_of(stage), f"{stage.path}.param.antialias", False, why))
    _sources(files, data, run)


def _sources(files: Files, data: Node, run: Migrated) -> None:
    """The tables of clips and their folders: of a list of such, or one table of two keys."""
    at = "dataset_param.basic_parameters."
    listed, folder = str(value_at(data, f"{at}data_path", "") or ""), value_at(data, f"{at}data_folder")
    place, of_folder = place_at(data, f"{at}data_path"), place_at(data, f"{at}data_folder")
    found = resolve(listed, files.main) if listed else None
    rows = [[folder, listed]]
    if not listed or value_at(data, "dataset_param.dataset_type") == "feature":
        rows = [[None, "data/annotation.json"]]
    elif listed.endswith(".txt") and found is not None and found.is_file():
        lines = found.read_text(errors="replace").splitlines()
        rows = [[None, *(part.strip() for part in line.split(","))][-2:] for line in lines if line.strip()]
        place = of_folder = f"{found.name}:1, by {place}"
    for number, (folder, table) in enumerate(rows):
        run.set(f"data.train.sources.{number}.annotations", table, place)
        if folder:
            run.set(f"data.train.sources.{number}.folder", folder, of_folder)


def migrate_hunyuan(files: Files, model: Node, run: Migrated) -> None:
    """A run of HunyuanVideo 1.5, by the pipeline's folder of Diffusers."""
    run.set("task.type", "diffusers/pipeline", place_at(model, "predictor.model_id"))
    apply(HUNYUAN, model, run)
    folder = run.lines["task.pipeline"].value
    run.todo.append(
        f"task.pipeline: the folder of a pipeline of Diffusers, such as "
        f"hub:hunyuanvideo-community/{folder}; MindSpeed-MM reads the original files"
    )
    load = load_of(files)
    if load is not None and "transformer" not in Path(path(to_python(load))).parts:  # else the original files
        begin(files, load, folder, run)
    _clips(files, run)
    for name in ("tokenizer", "max_length"):
        run.leave(f"task.text_encoder.{name}", "as in the pipeline's folder")
