"""Wan and HunyuanVideo 1.5: model.json and data.json as a task of clips."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mm_core.interchange import Left, Migrated, Node, apply, place_of, read_source, to_python
from mm_mindspeed.begin import begin, load_of
from mm_mindspeed.files import Files, resolve, value_at
from mm_mindspeed.tables.converts import path
from mm_mindspeed.tables.data import DATA, RESIZES
from mm_mindspeed.tables.video import HUNYUAN, SIZES, VIDEO

_PRESETS = {
    (1536, 30, 8960, 16, 16, ""): "wan2.1-t2v-1.3b",
    (5120, 40, 13824, 16, 16, ""): "wan2.1-t2v-14b",
    (5120, 40, 13824, 36, 16, "i2v"): "wan2.1-i2v-14b-480p",
    (5120, 40, 13824, 36, 16, "flf2v"): "wan2.1-flf2v-14b-720p",
    (5120, 40, 13824, 36, 16, "wan2.2-i2v"): "wan2.2-i2v-a14b",
    (3072, 30, 14336, 48, 48, ""): "wan2.2-ti2v-5b",
}
"""Width, blocks, inner width, channels in and out, model_type -> the published model."""
_PUBLISHED: dict[str, Any] = {"patch_size": [1, 2, 2], "text_dim": 4096, "freq_dim": 256, "img_dim": 1280}
_PUBLISHED |= {"cross_attn_norm": True, "eps": 1e-6, "max_seq_len": 1024}
"""Sizes that all published models have."""
_A14B = {"t2v": "wan2.2-t2v-a14b", "i2v": "wan2.2-i2v-a14b"}
_OF_PAIRS = ("wan2.1-t2v-14b", "wan2.2-i2v-a14b")  # sizes of Wan 2.2's experts
_BOUNDARY = {"t2v": 0.875, "i2v": 0.9}
_FRAMES: dict[str, list[str]] = {"t2v": [], "i2v": ["first"], "ti2v": ["first"], "flf2v": ["first", "last"]}
_ENCODERS = "features that were extracted before; the encoders are those of the pipeline"


def migrate_wan(files: Files, model: Node, run: Migrated) -> None:
    """A run of Wan 2.1 or 2.2."""
    where = f"{Path(model.where).name} predictor"
    run.set("task.type", "text_to_video", where if model.at("task") is None else _place(model, "task"))
    cached = bool(value_at(model, "load_video_features") or value_at(model, "load_text_features"))
    apply(VIDEO, model, run)
    encoders = _encoders(files, model, run) if cached else model
    _pixel_tiles(model if model.at("ae") is not None else encoders, run)
    _predictor(files, model, _pipeline(files, encoders), run)
    _clips(files, run, cached)
    kind = str(value_at(model, "task", "t2v"))
    if kind in _FRAMES and value_at(model, "predictor.in_dim") != 16:
        run.set("task.frames", _FRAMES[kind], _place(model, "task"))
    _image_encoder(kind, _pipeline(files, encoders), model, run)


def _place(node: Node, key: str) -> str:
    found = node.at(*key.split("."))
    return place_of(found if found is not None else node)


def _pipeline(files: Files, encoders: Node | None) -> str:
    """The folder of the pipeline: that of the autoencoder, else of the weights to begin with."""
    load = str(value_at(files.flags, "--load", "") or "").rstrip("/")
    own = str(value_at(encoders, "ae.from_pretrained", "") or "").rstrip("/")
    if load.endswith("/transformer"):
        return load.removesuffix("/transformer")
    return own.removesuffix("/vae") if own.endswith("/vae") else load


def _encoders(files: Files, model: Node, run: Migrated) -> Node | None:
    """The file that features were extracted with, beside the example: its encoders are run here."""
    kind = str(value_at(model, "task", "t2v"))
    folder = resolve("feature_extract", files.main)
    place = _place(model, "load_video_features")
    run.set("data.cache.dir", "cache", place, "each clip is encoded once: their .pt files are not read")
    found = folder / f"model_{kind}.json" if folder is not None else None
    if found is not None and found.is_file():
        encoders = read_source(found)
        parts = ("task", "ae.", "text_encoder.", "load_")
        apply([row for row in VIDEO if row.theirs.startswith(parts)], encoders, run)
        run.leave("task.image_encoder.from_pretrained", _ENCODERS)
        _as_extracted(files, found.with_name("data.json"), run)
    else:
        encoders = None
        run.todo.append(f"data.train.sources: the clips that the features were extracted from ({place})")
        run.set("task.autoencoder.type", "wan/vae", place, _ENCODERS)
        run.set("task.text_encoder.type", "wan/umt5", place, _ENCODERS)
    pipeline = _pipeline(files, encoders)
    for part, folder_name in (("autoencoder", "vae"), ("text_encoder", "text_encoder")):
        run.set(f"task.{part}.from_pretrained", f"{pipeline}/{folder_name}", place, _ENCODERS)
    run.set("task.text_encoder.tokenizer", f"{pipeline}/tokenizer", place, _ENCODERS)
    return encoders


def _as_extracted(files: Files, data: Path, run: Migrated) -> None:
    """Reads clips as they were read for the features; the order of samples stays that of the training."""
    if not data.is_file():
        return
    own, extracted = files.data, read_source(data)
    if own is not None:
        why = f"of the features; the clips are read as {data.parent.name}/{data.name} has it"
        run.dropped.append(Left(_place(own, "dataset_param"), "dataset_param", "...", why))
        loader = own.at("dataloader_param")
        extracted = extracted if loader is None else extracted.put("dataloader_param", loader)
    files.data = extracted


def _pixel_tiles(model: Node | None, run: Migrated) -> None:
    """Tiles in latents as tiles in pixels."""
    for theirs, ours in (("tile_size", "min"), ("tile_stride", "stride")):
        sizes = value_at(model, f"ae.tiling_param.{theirs}")
        for size, side in zip(sizes or (), ("height", "width"), strict=False):
            assert model is not None
            key = f"task.autoencoder.tiling_param.tile_sample_{ours}_{side}"
            run.set(key, 8 * int(size), _place(model, f"ae.tiling_param.{theirs}"), "pixels, 8 to a latent")


def _predictor(files: Files, model: Node, pipeline: str, run: Migrated) -> None:
    sizes = value_at(model, "predictor", {})
    low, high = (value_at(model, f"diffusion.{end}_timestep_boundary") for end in ("min", "max"))
    kind = "i2v" if sizes.get("in_dim") == 36 else "t2v"
    place = place_of(model.at("predictor") or model)
    expert = None
    if bool(low) != (high not in (None, 1)) and _preset(sizes) in _OF_PAIRS:  # else the scheduler has both
        expert = "low" if low else "high"
    run.set("task.predictor.type", "wan/two_expert" if expert else "wan/transformer", place)
    if sizes.get("model_id") != "wandit":
        why = (
            "no predictor of this name is here, and Wan's transformer stands in its place: make a plugin of"
            " your class with `mm plugins new NAME --from-class FILE:CLASS`"
        )
        run.differs.append(
            Left(_place(model, "predictor.model_id"), "predictor.model_id", sizes.get("model_id"), why)
        )
    preset = _A14B[kind] if expert else _preset(sizes)
    if expert and _boundary(kind, float(low or high), model)[0] != _BOUNDARY[kind]:
        preset = None  # a preset has its boundary too
    if expert:
        run.set("task.predictor.train", expert, place_of(model.at("diffusion") or model))
        run.set("task.predictor.boundary", *_boundary(kind, float(low or high), model))
        for key in ("engine.sub_modules_to_wrap", "engine.recompute_modules"):
            if (line := run.lines.get(key)) is not None and line.value != "auto":
                of_experts = [name.replace("predictor.", "predictor.{*}.", 1) for name in line.value]
                run.set(key, of_experts, line.place, "of the expert")
        for end in ("min", "max"):
            run.leave(f"task.scheduler.{end}_timestep_boundary", "task.predictor.boundary gives it")
    if preset:
        run.set("task.predictor.preset", preset, place, "has all of its sizes")
    else:
        _sizes(model, sizes, run)
    run.set("task.autoencoder.latent_channels", sizes.get("out_dim", 16), place)
    _weights(files, model, pipeline, run, preset is not None or expert is not None)


def _boundary(kind: str, share: float, model: Node) -> tuple[float, str]:
    """Where the high-noise expert ends: their share of the levels, counted from noise, as a share of the
    timesteps; the published pair's, where that is meant."""
    place = _place(model, "diffusion")
    shift = float(value_at(model, "diffusion.shift", 3.0))
    sigma = shift * (1 - share) / (1 + (shift - 1) * (1 - share))
    published = _BOUNDARY[kind]
    return (published if abs(sigma - published) < 1e-3 else round(sigma, 6)), place


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
    if any(sizes.get(name, value) != value for name, value in _PUBLISHED.items()):
        return None
    if heads and sizes.get("hidden_size") != 128 * heads:
        return None
    key: Any = tuple(
        sizes.get(name) for name in ("hidden_size", "num_layers", "ffn_dim", "in_dim", "out_dim")
    )
    kind = sizes.get("model_type", "i2v" if sizes.get("in_dim") == 36 else "")
    return _PRESETS.get((*key, kind)) or _PRESETS.get((*key, ""))


def _sizes(model: Node, sizes: dict[str, Any], run: Migrated) -> None:
    for theirs, ours in SIZES.items():
        if theirs not in sizes or (theirs == "img_dim" and sizes.get("model_type") != "i2v"):
            continue
        value = sizes[theirs]
        if theirs == "hidden_size":
            value = value // sizes["num_heads"]
        run.set(f"task.predictor.{ours}", value, _place(model, f"predictor.{theirs}"))
        if theirs == "img_dim":
            width = sizes["hidden_size"]
            run.set("task.predictor.added_kv_proj_dim", width, _place(model, "predictor.hidden_size"))


def _image_encoder(kind: str, pipeline: str, model: Node, run: Migrated) -> None:
    """Wan 2.1's models of a first frame look at it through CLIP."""
    if value_at(model, "predictor.model_type") not in ("i2v", "flf2v"):
        run.leave("task.image_encoder.from_pretrained", "the predictor looks at no image")
        return
    place = _place(model, "predictor.model_type")
    run.set("task.image_encoder.type", "wan/clip_vision", place)
    if "task.image_encoder.from_pretrained" not in run.lines:
        run.set("task.image_encoder.from_pretrained", f"{pipeline}/image_encoder", place, _ENCODERS)


def _clips(files: Files, run: Migrated, cached: bool = False) -> None:
    """data.json as a dataset of clips, and its loader."""
    run.leave("data.train.max_length", "clips have no tokens of their own")
    data = files.data
    where = files.main.name if data is None else _place(data, "dataset_param.dataset_type")
    note = "a clip that cannot be read is left out and counted; theirs takes another one at random"
    run.set("data.train.type", "media_text", where, note)
    if data is None:
        run.todo.append("data.train.sources: the clips; the run's data.json is not there")
        data = Node({}, str(files.main), "")
    features = value_at(data, "dataset_param.dataset_type") == "feature"
    apply(DATA, data, run)
    _antialias(data, run)
    if features:  # captions were encoded before: none is dropped
        place = _place(data, "dataset_param.dataset_type")
        run.set("task.caption_dropout", 0.0, place, "features of captions are never dropped")
        run.leave("task.text_encoder.max_length", "of features that were extracted before")
    _sources(files, data, run, features)
    _reading(data, run, cached)
    set_sampler(data, run)


def _reading(data: Node, run: Migrated, cached: bool) -> None:
    """Which frames of a clip, at which size, and what becomes of clips that are too short."""
    parameters = "dataset_param.preprocess_parameters."
    forced = value_at(data, f"{parameters}force_resolution", True)
    sizes = []
    for side, value in (("height", 480), ("width", 640)):
        found = data.at(*f"{parameters}max_{side}".split("."))
        sizes.append(value if found is None else found.value)
        name = f"data.train.{'' if forced else 'max_'}{side}"
        place = place_of(found) if found is not None else f"default of the tool for max_{side}"
        run.set(name, sizes[-1], place)
    if not forced:
        place = _place(data, f"{parameters}force_resolution")
        run.set("data.loader.mode", "variable", place, "buckets keep the aspect of clips, nearly")
    if value_at(data, f"{parameters}auto_interval", True) is False:
        run.set("data.train.fps", None, _place(data, f"{parameters}auto_interval"), "every frame is taken")
    if cached and (line := run.lines.get("data.train.random_start")) is not None and line.value:
        note = "theirs drew the beginning once, with the features; so does data.cache"
        run.set("data.train.random_start", True, line.place, note)
    area = value_at(data, f"{parameters}max_hxw", sizes[0] * sizes[1])
    why = "the area of max_height and max_width" if forced or area == sizes[0] * sizes[1] else None
    _left(data, f"{parameters}max_hxw", area, why, "buckets are up to max_height x max_width here", run)
    if value_at(data, f"{parameters}video_processor_type") != "VACEVideoProcessor":
        ratio, short = value_at(data, f"{parameters}drop_short_ratio", 1.0), 1 if forced else 0
        why = "so are short clips treated here" if ratio == short else None
        other = f"clips that are too short {'are left out' if forced else 'go to shorter buckets'} here"
        _left(data, f"{parameters}drop_short_ratio", ratio, why, other, run)


def _left(data: Node, key: str, value: Any, same: str | None, other: str, run: Migrated) -> None:
    """Lists a key, or its default: among what is dropped if it is the same here, else as different."""
    found = data.at(*key.split("."))
    place = place_of(found) if found is not None else f"default of the tool for {key}"
    if same is None:
        run.differs.append(Left(place, key, value, other))
    elif found is not None:
        run.dropped.append(Left(place, key, value, same))


def _antialias(data: Node, run: Migrated) -> None:
    """Resizing without antialiasing has no counterpart; theirs is without it unless a stage asks for it."""
    pipeline = data.at("dataset_param", "preprocess_parameters", "train_pipeline")
    for name in ("video", "video_and_first_frame", "video_only"):
        for stage in pipeline.items(name) if pipeline is not None else ():
            if value_at(stage, "trans_type") in RESIZES and not value_at(stage, "param.antialias", False):
                why = "frames are resized with antialiasing here"
                run.differs.append(Left(place_of(stage), f"{stage.path}.param.antialias", False, why))


def _sources(files: Files, data: Node, run: Migrated, features: bool) -> None:
    listed = str(value_at(data, "dataset_param.basic_parameters.data_path", "") or "")
    place = _place(data, "dataset_param.basic_parameters.data_path")
    found = resolve(listed, files.main) if listed else None
    rows: list[tuple[str, str | None]] = []
    of_folder = ""
    if features or not listed:
        rows = [("data/annotation.json", None)]
    elif listed.endswith(".txt") and found is not None and found.is_file():
        lines = [line.strip() for line in found.read_text(errors="replace").splitlines() if line.strip()]
        pairs = [[part.strip() for part in line.split(",")] for line in lines]
        rows = [(pair[-1], pair[0] if len(pair) > 1 else None) for pair in pairs]
        place = f"{found.name}:1, by {place}"
    else:
        rows = [(listed, value_at(data, "dataset_param.basic_parameters.data_folder"))]
        of_folder = _place(data, "dataset_param.basic_parameters.data_folder")
    for number, (table, folder) in enumerate(rows):
        run.set(f"data.train.sources.{number}.annotations", table, place)
        if folder:
            run.set(f"data.train.sources.{number}.folder", folder, of_folder or place)


def set_sampler(data: Node, run: Migrated) -> None:
    """The order of samples: theirs is at random where the sampler shuffles."""
    kind = value_at(data, "dataloader_param.sampler_type", "BaseRandomBatchSampler")
    shuffled = value_at(data, "dataloader_param.shuffle", True)
    order = "sequential" if kind == "SequentialSampler" or shuffled is False else "random"
    run.set("data.loader.sampler", order, _place(data, "dataloader_param.sampler_type"))


def migrate_hunyuan(files: Files, model: Node, run: Migrated) -> None:
    """A run of HunyuanVideo 1.5, by the pipeline's folder of Diffusers."""
    place = _place(model, "predictor.model_id")
    run.set("task.type", "diffusers/pipeline", place)
    apply(HUNYUAN, model, run)
    kind = value_at(model, "task", "t2v")
    folder = f"HunyuanVideo-1.5-Diffusers-720p_{kind}"
    run.set(
        "task.pipeline", folder, _place(model, "task"), "the pipeline of Diffusers, with the same weights"
    )
    run.todo.append(
        f"task.pipeline: the folder of a pipeline of Diffusers, such as "
        f"hub:hunyuanvideo-community/{folder}; MindSpeed-MM reads the original files"
    )
    for part, name in (("autoencoder", "vae"), ("scheduler", "schedule")):
        if any(key.startswith(f"task.{part}.") for key in run.lines):
            run.set(f"task.{part}.type", f"diffusers/{name}", place)
    load = load_of(files)
    if load is not None and "transformer" not in Path(path(to_python(load))).parts:  # else the original files
        begin(files, load, folder, run)
    _clips(files, run)
    for name in ("tokenizer", "max_length"):
        run.leave(f"task.text_encoder.{name}", "as in the pipeline's folder")
