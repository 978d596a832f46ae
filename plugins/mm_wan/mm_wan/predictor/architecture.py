"""Which transformer is meant: a folder's, a published one, or one by its fields.

Two layouts are read: that of Diffusers (config.json of `WanTransformer3DModel`, alone or in a pipeline's
folder) and Wan-AI's own (config.json of `WanModel`, https://github.com/Wan-Video/Wan2.1,
wan/modules/model.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_core.contracts import WeightsFrom
from mm_core.errors import CheckpointError, ConfigError, did_you_mean
from mm_core.weights import open_stored, pipeline_parts, read_mapping
from mm_wan.presets import DEFAULTS, PRESETS, Architecture, largest, presets_of

CLASS = "WanTransformer3DModel"
ORIGINAL_CLASS = "WanModel"
STEM = "diffusion_pytorch_model"
INDEX = "model_index.json"
EXPERT_PARTS = {"high": "transformer", "low": "transformer_2"}
"""Folders of Wan 2.2's two transformers in a pipeline: for much noise, and for little."""
EXPERT_FOLDERS = {"high": "high_noise_model", "low": "low_noise_model"}
"""The same in the folder that Wan-AI publishes."""
ACCEPTED = (
    f"the folder of a Wan pipeline ({INDEX}), of its transformer (config.json of {CLASS}),"
    f" or as Wan-AI lays it out (config.json of {ORIGINAL_CLASS})"
)
_ORIGINAL_KEYS = ("dim", "ffn_dim", "freq_dim", "in_dim", "num_heads", "num_layers", "out_dim")


def resolve(
    from_pretrained: str | None, preset: str | None, fields: Mapping[str, Any]
) -> tuple[Architecture, WeightsFrom | None]:
    """The architecture, and the weights that it begins with.

    Args:
        from_pretrained: a folder. Where it does not exist yet and `preset` names what it will hold, the
            preset serves: a run can be planned before its weights are fetched.
        preset: a name of PRESETS.
        fields: of the architecture; those that are None were not set.

    Raises:
        CheckpointError: a folder that is no Wan transformer's, or another one's than the preset's.
        ConfigError: a name that no preset has, or fields that contradict the folder or the preset.
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
        weights = WeightsFrom(from_pretrained, "wan/original" if is_original(folder) else "wan/diffusers")
        if folder.exists() or preset is None:
            published = read_fields(folder)
            if preset is not None:
                _check_preset(folder, published, preset)
            return _uncontradicted(published, given, from_pretrained), weights
    if preset is not None:
        return _uncontradicted(PRESETS[preset].architecture, given, f"preset {preset}"), weights
    return Architecture(**given), weights


def _check_preset(folder: Path, published: Architecture, preset: str) -> None:
    expected = PRESETS[preset].architecture
    if different := _differences(published.fields, expected):
        held = " or ".join(presets_of(published)) or "no published model"
        raise CheckpointError(
            f"the preset is {preset}, and this folder holds {held}: {different}",
            where=str(folder),
            hint="leave preset out: the folder says what it holds",
        )


def _uncontradicted(published: Architecture, given: Mapping[str, object], origin: str) -> Architecture:
    if different := _differences(given, published):
        raise ConfigError(
            f"these options contradict {origin}: {different}",
            hint="leave them out: the published config counts",
        )
    return published


def _differences(found: Mapping[str, object], expected: Architecture) -> str:
    pairs = ((name, value, getattr(expected, name)) for name, value in found.items())
    return ", ".join(f"{name} {one} instead of {other}" for name, one, other in pairs if one != other)


# -- folders -------------------------------------------------------------------------------------


def read_fields(folder: Path) -> Architecture:
    """The architecture of the transformer in a folder. CheckpointError where there is none."""
    if not folder.is_dir():
        raise CheckpointError(
            "this is a file" if folder.exists() else "there is no such folder",
            where=str(folder),
            accepted=ACCEPTED,
            hint="fetch the weights there; or set preset to plan a run without them",
        )
    if is_original(folder):
        return _original_fields(folder)
    place = folder
    if (folder / INDEX).is_file():
        index = read_mapping(folder / INDEX)
        parts = wan_parts(folder)
        if not parts:
            raise CheckpointError(
                f"this pipeline ({index.get('_class_name', 'of no class')}) has no Wan transformer",
                where=str(folder),
                accepted=ACCEPTED,
            )
        if len(parts) > 1:
            raise CheckpointError(
                f"this pipeline has {len(parts)} transformers, each for timesteps of its own",
                where=str(folder),
                accepted=f"one of them: {' or '.join(str(folder / part) for part in parts)}",
                hint="wan/two_expert takes both, and trains them together or one alone on its timesteps",
            )
        place = folder / parts[0]
    config = read_mapping(place / "config.json")
    if config.get("_class_name") != CLASS:
        found = f"config.json is of {config['_class_name']}" if "_class_name" in config else ""
        missing = (
            "config.json names no class" if (place / "config.json").exists() else "config.json is missing"
        )
        raise CheckpointError(
            f"this is no Wan transformer: {found or missing}", where=str(place), accepted=ACCEPTED
        )
    return _diffusers_fields(config, place / "config.json")


def wan_parts(folder: Path) -> list[str]:
    """The Wan transformers that a pipeline's folder lists: `transformer`, `transformer_2`. Both of them are
    also found without a pipeline around them."""
    index = read_mapping(folder / INDEX)
    if not index:
        both = list(EXPERT_PARTS.values())
        found = [read_mapping(folder / name / "config.json").get("_class_name") for name in both]
        return both if found == [CLASS, CLASS] else []
    return sorted(name for name, kind in pipeline_parts(folder).items() if kind == CLASS)


def is_original(folder: Path) -> bool:
    """Whether a folder is laid out as Wan-AI does; by its config.json alone."""
    config = read_mapping(folder / "config.json")
    return config.get("_class_name", ORIGINAL_CLASS) == ORIGINAL_CLASS and config.keys() >= set(
        _ORIGINAL_KEYS
    )


def pipeline_of(weights: WeightsFrom | None) -> tuple[Path, str] | None:
    """(pipeline's folder, name of the transformer's folder in it) for weights that lie in a pipeline."""
    if weights is None:
        return None
    path = Path(weights.path)
    if parts := wan_parts(path):
        return path, parts[0]
    # A link is followed no further than its name: `transformer` in the pipeline's own folder.
    parent = path.absolute().parent
    return (parent, path.absolute().name) if path.absolute().name in wan_parts(parent) else None


def _diffusers_fields(config: Mapping[str, object], where: Path) -> Architecture:
    settings = {name: value for name, value in config.items() if not name.startswith("_")}
    if strange := [name for name in settings if name not in DEFAULTS]:
        raise CheckpointError(
            f"this transformer has settings that {CLASS} does not know: {', '.join(strange)}",
            where=str(where),
            accepted=", ".join(DEFAULTS),
            hint="it is another variant of Wan, or needs a later version of this plugin",
        )
    fields = {**DEFAULTS, **settings}
    if isinstance(patch := fields["patch_size"], list):
        fields["patch_size"] = tuple(patch)
    fields["out_channels"] = fields["out_channels"] or fields["in_channels"]
    return _checked(fields, where)


def _checked(fields: Mapping[str, Any], where: Path) -> Architecture:
    """The architecture of these fields. CheckpointError for a value that is none of its field: nobody vouches
    for the folder."""
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


def _original_fields(folder: Path) -> Architecture:
    """What config.json does not say (WanModel keeps it out) is seen from the tensors' shapes."""
    config = read_mapping(folder / "config.json")
    if strange := [name for name in _ORIGINAL_KEYS if not _is_size(config[name], name)]:
        raise CheckpointError(
            f"{strange[0]} is {repr(config[strange[0]])[:60]}",
            where=str(folder / "config.json"),
            accepted=f"a whole number from 1 to {largest(strange[0])}",
        )
    shapes = open_stored(folder, STEM).shapes
    needed = ("patch_embedding.weight", "text_embedding.0.weight")
    if absent := [name for name in needed if name not in shapes]:
        raise CheckpointError(f"these weights lack {', '.join(absent)}", where=str(folder), accepted=ACCEPTED)
    image = shapes.get("img_emb.proj.1.weight")
    positions = shapes.get("img_emb.emb_pos")
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
    return _checked(fields, folder / "config.json")


# -- two experts ---------------------------------------------------------------------------------


def expert_folders(top: Path) -> dict[str, str]:
    """Where the experts lie below a folder, by their names. Of one that does not exist yet, a pipeline's.

    CheckpointError for a folder that does not hold two.
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
    what = "a lone transformer" if lone else f"of two experts only {found[0]}" if found else "no two experts"
    raise CheckpointError(
        f"this folder holds {what}",
        where=str(top),
        accepted=f"a pipeline's folder ({INDEX}) with {' and '.join(EXPERT_PARTS.values())}, or Wan-AI's "
        f"with {' and '.join(EXPERT_FOLDERS.values())}",
        hint="wan/transformer trains a lone one" if lone or found else None,
    )


def stored_boundary(top: Path) -> float | None:
    """What a pipeline's index says of its two transformers; None where it says nothing."""
    found = read_mapping(top / INDEX).get("boundary_ratio")
    if found is None or (type(found) is float and 0 < found < 1):
        return found
    raise CheckpointError(
        f"boundary_ratio is {found!r}", where=str(top / INDEX), accepted="a number between 0 and 1"
    )
