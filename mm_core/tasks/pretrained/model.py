"""Building a Transformers model from its folder: its class, and its modules on the meta device."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from mm_core.builtin.configs.pretrained import PretrainedConfig
from mm_core.contracts import WeightsFrom, empty_parameters
from mm_core.diffusion.encoders.hf_folder import ModelFolder, dtype_key
from mm_core.errors import (
    CheckpointError,
    ContractError,
    MMError,
    RunWarning,
    first_line,
    foreign_code,
    nearest,
)
from mm_core.hub import no_folder
from mm_core.modules.patterns import select_parameters
from mm_core.plugin.trust.remote_code import check_overrides, code_folder
from mm_core.tasks.pretrained import packed_attention
from mm_core.tasks.pretrained.initial import initialiser
from mm_core.weights.formats.libraries import read_mapping

if TYPE_CHECKING:
    from transformers import PretrainedConfig as ModelConfig
    from transformers import PreTrainedModel


def build_model(wanted: PretrainedConfig, name: str) -> PreTrainedModel:
    """Builds the Transformers model of a folder: parameters on the meta device, tables computed.

    The model gets what mm_core expects of a component: `init_weights`, and `weights_from` if files contain
    its weights.

    Args:
        wanted: the task's config.
        name: the model's attribute in its task.

    Raises:
        CheckpointError: the folder is missing or contains no model.
        ContractError: the class is missing, or does not fit the folder.
    """
    folder = Path(wanted.from_pretrained)
    if not (folder / "config.json").is_file():
        accepted = "a model folder as written by Transformers' save_pretrained"
        hint = "download the model (hf download NAME --local-dir DIR) and set task.from_pretrained: DIR"
        if not folder.is_dir():
            raise no_folder(folder, accepted, hint)
        what = "this folder contains no config.json"
        raise CheckpointError(what, where=str(folder), accepted=accepted, hint=hint)
    if wanted.trust_remote_code:
        what = f"task.trust_remote_code is on: Python files in {folder} are executed"
        warnings.warn(what, RunWarning, stacklevel=2)
    with torch.device("cpu"):  # modules imported here may create tensors
        kind = _class_of(wanted.auto_class)  # its module may register further model types

        def make() -> tuple[ModelConfig, PreTrainedModel]:
            with code_folder(folder, wanted.trust_remote_code) as place:
                config = _config_of(place, wanted)
                model = _made(kind, config, wanted, place)
                if place != folder:
                    model.name_or_path = model.config.name_or_path = str(folder)
            return config, model

        # Random buffers must be the same on every rank.
        with torch.random.fork_rng(devices=[]), empty_parameters():
            torch.default_generator.manual_seed(0)
            config, model = make()
        _read_generation(model, folder)
        model.init_weights = initialiser(model, lambda: make()[1])
    paths = [path for path, _ in model.named_parameters(prefix=name)]
    begun = select_parameters(wanted.new_modules, paths, "task.new_modules")
    new = tuple(path.removeprefix(f"{name}.") for path in begun)
    model.weights_from = None
    if wanted.weights == "files":
        # A config.json read as a different type from the stated one has a different layout.
        stated = read_mapping(folder / "config.json").get("model_type", config.model_type)
        layout = "core/transformers" if stated == config.model_type else None
        model.weights_from = WeightsFrom(str(folder), layout, part=True, new=new)
    return model


def _config_of(folder: Path, wanted: PretrainedConfig) -> ModelConfig:
    try:
        config = ModelFolder(folder, "model", trust_remote_code=wanted.trust_remote_code).config()
    except CheckpointError as fault:
        raise _untrusted(folder, wanted, fault) from fault
    check_overrides(wanted.overrides, wanted.trust_remote_code)
    _override(config, wanted.overrides, "task.overrides")
    if wanted.labels:
        config.id2label = dict(enumerate(wanted.labels))
        config.label2id = {label: index for index, label in enumerate(wanted.labels)}
    return config


def _override(config: ModelConfig, changes: Mapping[str, object], where: str) -> None:
    """Sets keys of a config and of its sub-configs. ContractError for an unknown key."""
    known = config.to_dict()
    for key, value in changes.items():
        if key not in known and not hasattr(config, key):
            raise ContractError(
                f"the model's config.json has no key {key!r}",
                where=where,
                accepted=", ".join(nearest(key, known, 5)) or f"a key of {type(config).__name__}",
            )
        if isinstance(value, Mapping) and key in config.sub_configs:
            _override(getattr(config, key), value, f"{where}.{key}")
        else:
            setattr(config, key, value)


_USUAL = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSequenceClassification")


def _class_of(auto_class: str) -> type[PreTrainedModel]:
    """A model class, or an auto class that chooses one by the config."""
    import transformers

    if ":" not in auto_class:
        kind = getattr(transformers, auto_class, None)
        if inspect.isclass(kind) and hasattr(kind, "from_config") and hasattr(kind, "_model_mapping"):
            return kind
        known = [name for name in dir(transformers) if name.startswith("AutoModel")]
        raise ContractError(
            f"Transformers has no auto class {auto_class!r}",
            where="task.auto_class",
            accepted=", ".join(dict.fromkeys([*nearest(auto_class, known, 3), *_USUAL]))
            + "; or module:Class",
        )
    module, _, name = auto_class.partition(":")
    try:
        with foreign_code():
            kind = getattr(importlib.import_module(module), name)
    except MMError:
        raise
    except Exception as fault:  # foreign code may raise anything
        raise ContractError(
            f"{auto_class!r} cannot be imported: {first_line(fault)}",
            where="task.auto_class",
            hint="correct module:Class, install the package that contains it, or fix the error in the module",
        ) from fault
    if not (inspect.isclass(kind) and issubclass(kind, transformers.PreTrainedModel)):
        raise ContractError(
            f"{auto_class!r} is not a Transformers model",
            where="task.auto_class",
            accepted="a subclass of transformers.PreTrainedModel",
        )
    return kind


def _made(
    kind: type[PreTrainedModel], config: ModelConfig, wanted: PretrainedConfig, folder: Path
) -> PreTrainedModel:
    options: dict[str, object] = {dtype_key(): torch.float32}
    if wanted.attn_implementation is not None:
        packed_attention.register()
        options["attn_implementation"] = wanted.attn_implementation
    automatic = hasattr(kind, "_model_mapping")
    make = kind.from_config if automatic else kind._from_config
    if automatic:
        options["trust_remote_code"] = bool(wanted.trust_remote_code)
    elif not isinstance(config, kind.config_class):
        raise _other_kind(kind, config, folder)
    try:
        model = make(config, **options)
        packed_attention.check(model)
        return model
    except MMError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, LookupError, ImportError, RuntimeError) as fault:
        if isinstance(fault, KeyError) and fault.args == (wanted.attn_implementation,):
            raise ContractError(
                f"the model of this folder does not support attention {wanted.attn_implementation!r}",
                where="task.attn_implementation",
                accepted="eager, sdpa",
                hint="remove task.attn_implementation",
            ) from fault
        if automatic and kind.__name__ in _code_of(folder):
            raise _untrusted(folder, wanted, _no_model(kind, folder, fault)) from fault
        if automatic and type(config) not in kind._model_mapping:
            raise _other_kind(kind, config, folder) from fault
        raise _no_model(kind, folder, fault) from fault


def _read_generation(model: PreTrainedModel, folder: Path) -> None:
    """Reads generation_config.json of the folder, if any. CheckpointError if it cannot be read."""
    file = folder / "generation_config.json"
    # A file that the library derived from config.json contains no more than that, and often less.
    derived = read_mapping(file).get("_from_model_config")
    if model.can_generate() and file.is_file() and not derived:
        settings = type(model.generation_config)
        try:
            model.generation_config = settings.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, TypeError) as fault:
            raise CheckpointError(
                f"this file cannot be read as generation settings: {first_line(fault)}",
                where=str(file),
                hint="fix the file, or remove it to use the defaults",
            ) from fault


def _no_model(kind: type[PreTrainedModel], folder: Path, fault: Exception) -> ContractError:
    return ContractError(
        f"{kind.__name__} cannot build a model from this folder: {first_line(fault)}",
        where=str(folder),
        hint="correct config.json of the folder or the task's settings, or choose another model",
    )


def _code_of(folder: Path) -> Mapping[str, object]:
    """The classes that config.json refers to in Python files of the folder: auto class -> class."""
    found = read_mapping(folder / "config.json").get("auto_map")
    return found if isinstance(found, dict) else {}


def _untrusted(folder: Path, wanted: PretrainedConfig, otherwise: MMError) -> MMError:
    """The error for a folder whose code was not run; `otherwise` if it has no code, or the code was run."""
    if wanted.trust_remote_code or not _code_of(folder):
        return otherwise
    return ContractError(
        "the model needs Python files of its folder, which are not executed without your permission",
        where=str(folder),
        hint="read these files; if you trust them, set task.trust_remote_code: true",
    )


def _other_kind(kind: type[PreTrainedModel], config: ModelConfig, folder: Path) -> ContractError:
    listed = ", ".join(config.architectures or ())
    return ContractError(
        f"{kind.__name__} cannot build this folder's model, which is of type {config.model_type!r}",
        where=str(folder),
        accepted=f"an auto class for it, or its own class: {listed}" if listed else "an auto class for it",
        hint="set task.auto_class to one of these, or task.from_pretrained to another folder",
    )


def forward_names(model: nn.Module) -> tuple[Sequence[str], bool]:
    """Argument names of a Transformers model's forward, and whether it accepts any other name."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY or p.kind is p.POSITIONAL_OR_KEYWORD]
    return names[1:], any(p.kind is p.VAR_KEYWORD for p in parameters)
