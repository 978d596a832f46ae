"""Finds the architecture of a Wan transformer: from a folder, from a preset, or from its fields.

Two folder layouts are read: Diffusers' (config.json of `WanTransformer3DModel`, alone or in a pipeline's
folder) and Wan-AI's (config.json of `WanModel`, https://github.com/Wan-Video/Wan2.1, wan/modules/model.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_core.contracts import WeightsFrom
from mm_core.errors import CheckpointError, ConfigError, did_you_mean
from mm_core.weights import no_folder, open_stored, pipeline_parts, read_mapping
from mm_wan.predictor.config import ExpertPaths
from mm_wan.presets import DEFAULTS, PRESETS, Architecture, largest, presets_of
from mm_wan.single_file import FORMAT, is_single, names_expert, transformer_sizes

CLASS = "WanTransformer3DModel"
ORIGINAL_CLASS = "WanModel"
STEM = "diffusion_pytorch_model"
INDEX = "model_index.json"
EXPERT_PARTS = {"high": "transformer", "low": "transformer_2"}
"""Folders of Wan 2.2's two transformers in a pipeline: high noise and low noise."""
EXPERT_FOLDERS = {"high": "high_noise_model", "low": "low_noise_model"}
"""Folders of Wan 2.2's two transformers in Wan-AI's own layout."""
ACCEPTED = (
    f"the folder of a Wan pipeline ({INDEX}), of its transformer (config.json of {CLASS}),"
    f" or in Wan-AI's layout (config.json of {ORIGINAL_CLASS})"
)
_ORIGINAL_KEYS = ("dim", "ffn_dim", "freq_dim", "in_dim", "num_heads", "num_layers", "out_dim")


def resolve(
    from_pretrained: str | None, preset: str | None, fields: Mapping[str, Any]
) -> tuple[Architecture, WeightsFrom | None]:
    """The architecture of a Wan transformer, and where its initial weights are.

    Args:
        from_pretrained: folder with weights. If it does not exist yet, `preset` replaces it, so a run can be
            planned before its weights are downloaded.
        preset: a name in PRESETS.
        fields: fields of the architecture; None means not set.

    Raises:
        CheckpointError: the folder holds no Wan transformer, or one different from the preset.
        ConfigError: the preset does not exist, or fields contradict the folder or the preset.
    """
    if preset is not None and preset not in PRESETS:
        raise ConfigError(
            f"no preset is named {preset!r}", accepted=", ".join(PRESETS), hint=did_you_mean(preset, PRESETS)
        )
    given = {name: value for name, value in fields.items() if value is not None}
    if "patch_size" in given:
        given["patch_size"] = tuple(given["patch_size"])
    weights = None
    if from_pretrained is not None:
        folder = Path(from_pretrained)
        format = FORMAT if is_single(folder) else "wan/original" if is_original(folder) else "wan/diffusers"
        weights = WeightsFrom(from_pretrained, format)
        if folder.exists() or preset is None:
            chosen = PRESETS[preset].architecture.num_attention_heads if preset is not None else None
            published = read_fields(folder, given.get("num_attention_heads", chosen))
            if preset is not None:
                _check_preset(folder, published, preset)
            return _uncontradicted(published, given, from_pretrained), weights
    if preset is not None:
        return _uncontradicted(PRESETS[preset].architecture, given, f"preset {preset}"), weights
    found = Architecture(**given)
    if (found.image_dim is None) != (found.added_kv_proj_dim is None):
        raise ConfigError(
            f"image_dim is {found.image_dim}, and added_kv_proj_dim is {found.added_kv_proj_dim}",
            accepted="both for a model that takes image features, or neither",
            hint=f"added_kv_proj_dim is the model's width, here {found.width}",
        )
    return found, weights


def _check_preset(folder: Path, published: Architecture, preset: str) -> None:
    expected = PRESETS[preset].architecture
    if different := _differences(published.fields, expected):
        held = " or ".join(presets_of(published)) or "no published model"
        raise CheckpointError(
            f"the preset is {preset}, but this folder holds {held}: {different}",
            where=str(folder),
            hint="leave preset out: the folder's config.json defines the architecture",
        )


def _uncontradicted(published: Architecture, given: Mapping[str, object], origin: str) -> Architecture:
    if different := _differences(given, published):
        raise ConfigError(
            f"these options contradict {origin}: {different}",
            hint="leave them out: the published config defines the architecture",
        )
    return published


def _differences(found: Mapping[str, object], expected: Architecture) -> str:
    pairs = ((name, value, getattr(expected, name)) for name, value in found.items())
    return ", ".join(f"{name} {one} instead of {other}" for name, one, other in pairs if one != other)


# -- folders -------------------------------------------------------------------------------------


def read_fields(folder: Path, heads: int | None = None) -> Architecture:
    """Reads the architecture of the Wan transformer in a folder, from its config.json.

    Args:
        folder: the folder, or one file of weights.
        heads: number of attention heads of a file that is not of a published model.

    Raises:
        CheckpointError: the folder is missing, or holds no Wan transformer or more than one.
    """
    if is_single(folder) and folder.is_file():
        return _original_fields(*transformer_sizes(folder, heads), folder)
    if not folder.is_dir():
        hint = "download the weights to it; or set preset to plan a run without them"
        if not folder.exists():
            raise no_folder(folder, ACCEPTED, hint)
        what = "this is a file, not a folder"
        raise CheckpointError(what, where=str(folder), accepted=ACCEPTED, hint=hint)
    if is_original(folder):
        config = read_mapping(folder / "config.json")
        _check_sizes(config, folder / "config.json")
        return _original_fields(config, open_stored(folder, STEM).shapes, folder / "config.json")
    place = folder
    if (folder / INDEX).is_file():
        index = read_mapping(folder / INDEX)
        parts = wan_parts(folder)
        if not parts:
            raise CheckpointError(
                f"this pipeline ({index.get('_class_name', 'class not named')}) has no Wan transformer",
                where=str(folder),
                accepted=ACCEPTED,
            )
        if len(parts) > 1:
            raise CheckpointError(
                f"this pipeline has {len(parts)} transformers, each for its own timesteps",
                where=str(folder),
                accepted=f"one of them: {' or '.join(str(folder / part) for part in parts)}",
                hint="to use both, set type: wan/two_expert; it trains both, or one on its own timesteps",
            )
        place = folder / parts[0]
    config = read_mapping(place / "config.json")
    if config.get("_class_name") != CLASS:
        found = f"config.json names the class {config['_class_name']}" if "_class_name" in config else ""
        missing = (
            "config.json names no class" if (place / "config.json").exists() else "config.json is missing"
        )
        raise CheckpointError(
            f"this folder holds no Wan transformer: {found or missing}", where=str(place), accepted=ACCEPTED
        )
    return _diffusers_fields(config, place / "config.json")


def wan_parts(folder: Path) -> list[str]:
    """Names of the Wan transformers in a pipeline's folder: `transformer`, `transformer_2`. A folder with
    both, but without the pipeline's index, counts as well."""
    index = read_mapping(folder / INDEX)
    if not index:
        both = list(EXPERT_PARTS.values())
        found = [read_mapping(folder / name / "config.json").get("_class_name") for name in both]
        return both if found == [CLASS, CLASS] else []
    return sorted(name for name, kind in pipeline_parts(folder).items() if kind == CLASS)


def is_original(folder: Path) -> bool:
    """Whether a folder has Wan-AI's own layout, judged by its config.json alone."""
    config = read_mapping(folder / "config.json")
    return config.get("_class_name", ORIGINAL_CLASS) == ORIGINAL_CLASS and config.keys() >= set(
        _ORIGINAL_KEYS
    )


def pipeline_of(weights: WeightsFrom | None) -> tuple[Path, str] | None:
    """Finds the Diffusers pipeline that holds a Wan transformer's weights.

    Returns:
        The pipeline's folder and the name of the transformer's folder in it; None outside a pipeline.
    """
    if weights is None:
        return None
    path = Path(weights.path)
    if parts := wan_parts(path):
        return path, parts[0]
    # Links are not resolved: the name `transformer` in the pipeline's own folder decides.
    parent = path.absolute().parent
    return (parent, path.absolute().name) if path.absolute().name in wan_parts(parent) else None


def _diffusers_fields(config: Mapping[str, object], where: Path) -> Architecture:
    settings = {name: value for name, value in config.items() if not name.startswith("_")}
    if strange := [name for name in settings if name not in DEFAULTS]:
        raise CheckpointError(
            f"config.json has settings that {CLASS} does not have: {', '.join(strange)}",
            where=str(where),
            accepted=", ".join(DEFAULTS),
            hint="the folder holds a variant of Wan that this version of mm-wan does not support: "
            "upgrade mm-wan",
        )
    fields = {**DEFAULTS, **settings}
    if isinstance(patch := fields["patch_size"], list):
        fields["patch_size"] = tuple(patch)
    fields["out_channels"] = fields["out_channels"] or fields["in_channels"]
    return _checked(fields, where)


def _checked(fields: Mapping[str, Any], where: Path) -> Architecture:
    """The architecture with these fields. Raises CheckpointError for a value that its field cannot have: the
    folder is not trusted."""
    for name, value in fields.items():
        accepted = f"a value such as {DEFAULTS[name]!r}"
        if name == "patch_size":
            good = (
                isinstance(value, tuple) and len(value) == 3 and all(_is_size(each, name) for each in value)
            )
        elif name == "eps":
            good = isinstance(value, float) and value > 0
        elif name in ("cross_attn_norm", "qk_norm"):
            good = type(value) is type(DEFAULTS[name])
        else:
            good = _is_size(value, name) or (value is None and DEFAULTS[name] is None)
            accepted = f"a whole number from 1 to {largest(name)}, such as {DEFAULTS[name]}"
            if DEFAULTS[name] is None:
                accepted = f"null, or a whole number from 1 to {largest(name)}"
        if not good:
            raise CheckpointError(f"{name} is {repr(value)[:60]}", where=str(where), accepted=accepted)
    return Architecture(**fields)


def _is_size(value: object, name: str) -> bool:
    return type(value) is int and 1 <= value <= largest(name)


def _check_sizes(config: Mapping[str, Any], where: Path) -> None:
    if strange := [name for name in _ORIGINAL_KEYS if not _is_size(config[name], name)]:
        raise CheckpointError(
            f"{strange[0]} is {repr(config[strange[0]])[:60]}",
            where=str(where),
            accepted=f"a whole number from 1 to {largest(strange[0])}",
        )


def _original_fields(
    config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], where: Path
) -> Architecture:
    """The architecture of weights with Wan-AI's names. WanModel's config.json omits some fields: they are
    derived from the shapes of the tensors."""
    _check_sizes(config, where)
    needed = ("patch_embedding.weight", "text_embedding.0.weight")
    if absent := [name for name in needed if name not in shapes]:
        raise CheckpointError(f"the weights lack {', '.join(absent)}", where=str(where), accepted=ACCEPTED)
    images = ("img_emb.proj.1.weight", "img_emb.emb_pos")
    if flat := [name for name in (*needed, *images) if len(shapes.get(name, (1, 1))) < 2]:
        raise CheckpointError(f"{flat[0]} has no columns", where=str(where), accepted=ACCEPTED)
    image, positions = (shapes.get(name) for name in images)
    fields = {
        **DEFAULTS,
        "patch_size": tuple(shapes["patch_embedding.weight"][2:]),
        "num_attention_heads": config["num_heads"],
        "attention_head_dim": config["dim"] // config["num_heads"],
        "in_channels": config["in_dim"],
        "out_channels": config["out_dim"],
        "text_dim": shapes["text_embedding.0.weight"][1],
        "freq_dim": config["freq_dim"],
        "ffn_dim": config["ffn_dim"],
        "num_layers": config["num_layers"],
        "cross_attn_norm": "blocks.0.norm3.weight" in shapes,
        "eps": config.get("eps", DEFAULTS["eps"]),
        "image_dim": image[1] if image else None,
        "added_kv_proj_dim": config["dim"] if image else None,
        "pos_embed_seq_len": positions[1] if positions else None,
    }
    return _checked(fields, where)


# -- two experts ---------------------------------------------------------------------------------


def expert_folders(top: Path) -> dict[str, str]:
    """Names of the folders of Wan 2.2's two experts below a folder, by expert (`high`, `low`). A folder that
    does not exist yet counts as a pipeline's.

    Raises:
        CheckpointError: the folder does not hold two experts.
    """
    if not top.exists():
        return EXPERT_PARTS
    parts = wan_parts(top)
    if set(EXPERT_PARTS.values()) <= set(parts):
        return EXPERT_PARTS
    lone = is_original(top) or read_mapping(top / "config.json").get("_class_name") == CLASS
    found = parts or [name for name in EXPERT_FOLDERS.values() if is_original(top / name)]
    if not parts and len(found) == len(EXPERT_FOLDERS):
        return EXPERT_FOLDERS
    what = (
        "a single transformer" if lone else f"only one expert, {found[0]}" if found else "no pair of experts"
    )
    raise CheckpointError(
        f"this folder holds {what}",
        where=str(top),
        accepted=f"a pipeline's folder ({INDEX}) with {' and '.join(EXPERT_PARTS.values())}, or Wan-AI's "
        f"with {' and '.join(EXPERT_FOLDERS.values())}",
        hint="to train a single transformer, set type: wan/transformer" if lone or found else None,
    )


def expert_files(files: ExpertPaths) -> tuple[Path, dict[str, str]]:
    """The folder of two files that hold an expert each, and their names in it by expert.

    Raises:
        CheckpointError: they are in different folders, or one has no `high` or `low` in its name.
    """
    paths = {"high": Path(files.high), "low": Path(files.low)}
    for name, path in paths.items():
        if path.suffix != ".safetensors" or not names_expert(path.name, name):
            raise CheckpointError(
                f"by its name, this is not the file of the expert {name!r}",
                where=str(path),
                accepted=f"a file as wan2.2_t2v_{name}_noise_14B_fp16.safetensors: with {name} in its name",
            )
    if paths["high"].parent != paths["low"].parent:
        raise CheckpointError(
            f"the files of the two experts are in different folders: {paths['high']} and {paths['low']}",
            where="task.predictor.from_pretrained",
            accepted="two files in one folder",
            hint="move or link one of them",
        )
    return paths["high"].parent, {name: path.name for name, path in paths.items()}


def stored_boundary(top: Path) -> float | None:
    """The boundary between Wan 2.2's two experts in a pipeline's index (`boundary_ratio`); None if not set.

    Raises:
        CheckpointError: the value is not a number between 0 and 1.
    """
    found = read_mapping(top / INDEX).get("boundary_ratio")
    if found is None or (type(found) is float and 0 < found < 1):
        return found
    raise CheckpointError(
        f"boundary_ratio is {found!r}", where=str(top / INDEX), accepted="a number between 0 and 1"
    )
