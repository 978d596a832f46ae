"""The settings of an adapter on disk: PEFT's adapter_config.json, or Diffusers' text in a file's header."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from mm_core.errors import CheckpointError, plural
from mm_core.weights.adapters.kinds import PEFT_TYPES

_CONFIG = "adapter_config.json"
_MOST = 10_000_000  # bytes of a config
_STARTS = (True, False, None, "gaussian", "orthogonal", "eva", "mica")  # others change the base weights
_DEFAULT = 8  # PEFT's r and alpha, where a config has none
_READ = {"peft_type", "r", "lora_alpha", "alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"}
_READ |= {"init_lora_weights"}
_IN_TENSORS = {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_bias"}
_IN_TENSORS |= {"decompose_both", "decompose_factor"}
_OF_TRAINING = {"lora_dropout", "rank_dropout", "module_dropout", "rank_dropout_scale", "init_weights"}
_OF_TRAINING |= {"loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"}
_ABOUT = {"task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"}
_ABOUT |= {"inference_mode", "runtime_config", "megatron_core", "qalora_group_size"}
# PEFT ignores the first for linear layers; the next is for convolutions, the last for shared weights.
_OF_OTHER_LAYERS = {"fan_in_fan_out", "use_effective_conv2d", "ensure_weight_tying"}
_KNOWN = _READ | _IN_TENSORS | _OF_TRAINING | _ABOUT | _OF_OTHER_LAYERS
"""The fields of PEFT's configs (0.21) that leave the change as its tensors, ranks and alphas have it."""
_WRAPPERS = re.compile(
    r"\A(module\.)+|(?<![^._^(])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\\?[._]"
)
"""What torch's wrappers (DDP; compile, FSDP1, recomputation, also in flat paths) add to names."""
_LOOPS = 3  # most repetitions in a pattern of an untrusted file: matching more can take forever


def plain_name(name: str) -> str:
    """A stored name, or a pattern of names, without what torch's wrappers of modules add."""
    return _WRAPPERS.sub("", name)


def config_beside(file: Path) -> Mapping[str, object]:
    """The settings in adapter_config.json beside PEFT's file.

    Raises:
        CheckpointError: there is none, or it cannot be read: the alphas would be lost.
    """
    path = file.with_name(_CONFIG)
    try:
        # Opening a pipe would block forever.
        text = path.read_text(encoding="utf-8") if path.is_file() and path.stat().st_size < _MOST else ""
        found = json.loads(text)
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not found:
        raise CheckpointError(
            "there is no such file, which contains the adapter's alpha"
            if not path.exists()
            else "this is not a JSON object with an adapter's settings: it may be truncated",
            where=str(path),
            hint="download or copy it again; if the adapter has a scale of 1, give its file another name",
        )
    return found


def header_settings(text: str, file: Path, start: str = "") -> Mapping[str, object]:
    """Diffusers' settings of the component at the `start` of keys, without its name."""
    try:
        found = json.loads(text)
        found = {key: value for key, value in found.items() if key.startswith(start)} or found
        if len({key.rpartition(".")[0] for key in found}) > 1:
            raise ValueError("of several components")
        return {key.rpartition(".")[2]: value for key, value in found.items()}
    except (ValueError, AttributeError, RecursionError):
        raise CheckpointError(
            "the lora_adapter_metadata in this file's header is not a JSON object with the settings of one"
            " component",
            where=str(file),
            hint="download or save the adapter again",
        ) from None


def check_settings(settings: Mapping[str, object], path: Path, beside: bool) -> None:
    """Refuses settings with which PEFT computes something other than the tensors show.

    Args:
        settings: of the adapter.
        path: the adapter, for errors.
        beside: whether the file's full modules are known (`modules_to_save`).

    Raises:
        CheckpointError: another kind of adapter, one that changed the base, or a setting that is not known.
    """
    if (kind := settings.get("peft_type", "LORA")) not in PEFT_TYPES.values():
        raise CheckpointError(
            f"this adapter has the type {kind}",
            where=str(path),
            accepted="LORA, with or without DoRA, LOKR, LOHA",
            hint="merge this adapter into its base weights with PEFT, and load those",
        )
    if (begun := settings.get("init_lora_weights")) not in _STARTS:
        raise CheckpointError(
            f"this adapter was initialised with {begun!r}, which also changed the base weights",
            where=str(path),
            accepted="adapters that leave the base weights unchanged",
            hint="save it again with PEFT's path_initial_model_for_weight_conversion",
        )
    known = _KNOWN | ({"modules_to_save"} if beside else set())
    if settings.get("bias") == "none":
        known |= {"bias"}
    if odd := {key: value for key, value in settings.items() if value and key not in known}:
        shown = ", ".join(f"{key}: {str(value)[:40]}" for key, value in list(odd.items())[:3])
        raise CheckpointError(
            f"this adapter has settings that change what it computes: {shown}",
            where=str(path),
            accepted="a LoRA, DoRA, LoKr or LoHa of linear layers, and nothing else",
            hint="if PEFT can, merge this adapter into its base weights with it, and load those",
        )


def check_doras(settings: Mapping[str, object], doras: Mapping[str, bool], file: Path) -> None:
    """CheckpointError where settings and tensors disagree on DoRA; `doras`: module -> has magnitudes."""
    expected = bool(settings.get("use_dora", any(doras.values())))
    if odd := [module for module, dora in doras.items() if dora != expected]:
        raise CheckpointError(
            f"by its settings and other modules this adapter is {'a' if expected else 'no'} DoRA, but"
            f" {plural(len(odd), 'module')} {'lack' if expected else 'have'} lora_magnitude_vector:"
            f" {', '.join(odd[:3])}",
            where=str(file),
            accepted="DoRA in all modules of an adapter, or in none",
            hint="download or save the adapter again",
        )


def rank_in(module: str, settings: Mapping[str, object], file: Path) -> int:
    """A module's rank by the settings, which the shapes of a LoKr of two whole matrices do not show."""
    found = _pattern("rank_pattern", module, settings, settings.get("r", _DEFAULT), file)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise CheckpointError(f"r is {found!r}", where=str(file), accepted="a whole number above 0")
    return found


def alpha_in(
    module: str, settings: Mapping[str, object], rank: int, own: Mapping[str, float], file: Path
) -> float:
    """A module's alpha: from the file's own tensors (`own`), else from the settings, else its rank."""
    found: object = own.get(module)
    if found is None:
        usual = settings.get("lora_alpha", settings.get("alpha", _DEFAULT if settings else rank))
        found = _pattern("alpha_pattern", module, settings, usual, file)
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 < found < float("inf"):
        raise CheckpointError(f"lora_alpha is {found!r}", where=str(file), accepted="a number above 0")
    return float(found)


def _pattern(
    field: str, module: str, settings: Mapping[str, object], otherwise: object, file: Path
) -> object:
    """A module's value in PEFT's patterns: regular expression of its path or of the path's end -> value."""
    table = settings.get(field) or {}
    if not isinstance(table, dict):
        raise CheckpointError(
            f"{field} is {str(table)[:40]}", where=str(file), accepted="a mapping of modules to numbers"
        )
    for key, value in table.items():
        loops = len(re.findall(r"[*+{]", key))
        try:
            bare = plain_name(key)
            found = None if loops > _LOOPS or re.search(r"\)[*+{]", key) else re.compile(rf"(.*\.)?({bare})$")
        except (re.error, OverflowError, RecursionError):
            found = None
        if found is None:
            raise CheckpointError(
                f"the pattern {key!r} in the adapter's {field} is not supported",
                where=str(file),
                accepted=f"regular expressions with at most {_LOOPS} repetitions, and no repeated group",
                hint=f"list the modules by name in {field} of adapter_config.json",
            )
        if found.match(module):
            return value
    return otherwise
