"""A model of Transformers from its folder: the class, the modules without memory, weights drawn by chance."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mm_core.builtin.configs.pretrained import PretrainedConfig
from mm_core.contracts import Randomness, WeightsFrom, empty_parameters
from mm_core.diffusion.hf_folder import ModelFolder, dtype_key
from mm_core.errors import CheckpointError, ContractError, MMError, RunWarning, first_line, nearest
from mm_core.parallel.freezing import covered
from mm_core.parallel.initialise import keep_local_part
from mm_core.tasks import packed_attention
from mm_core.weights.formats import read_mapping

_SEED = "mm_seed"


def build_model(wanted: PretrainedConfig, name: str) -> Any:
    """The model of a folder, called `name` in its task: parameters on the meta device, tables computed.

    It has what the core asks of a component: `init_weights`, and `weights_from` where files hold weights.

    Raises:
        CheckpointError: no such folder, or one that no model can be made of.
        ContractError: a class that there is not, or that makes no such model.
    """
    folder = Path(wanted.from_pretrained)
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            "this folder holds no config.json" if folder.is_dir() else "there is no such folder",
            where=str(folder),
            accepted="a folder as Transformers' save_pretrained writes it",
            hint="set task.from_pretrained; models are downloaded first: hf download NAME --local-dir DIR",
        )
    if wanted.trust_remote_code:
        what = f"task.trust_remote_code is on: Python files of {folder} are run"
        warnings.warn(what, RunWarning, stacklevel=2)
    with torch.device("cpu"):  # modules that are imported now may hold tensors of their own
        kind = _class_of(wanted.auto_class)  # its module may make further types of config.json known
        config = _config_of(folder, wanted)
        model = _made(kind, config, wanted, folder)
        _read_generation(model, folder)
        _prepare_initialisation(model)
    new = _new_parameters(model, wanted, name)
    model.weights_from = None
    if wanted.weights == "files":
        # A config.json that was read as another type than it states is of another layout.
        stated = read_mapping(folder / "config.json").get("model_type", config.model_type)
        layout = "core/transformers" if stated == config.model_type else None
        model.weights_from = WeightsFrom(str(folder), layout, part=True, new=new)
    return model


def _config_of(folder: Path, wanted: PretrainedConfig) -> Any:
    try:
        config = ModelFolder(folder, "model", trust_remote_code=wanted.trust_remote_code).config()
    except CheckpointError as fault:
        raise _untrusted(folder, wanted, fault) from fault
    _override(config, wanted.overrides, "task.overrides")
    if wanted.labels:
        config.id2label = dict(enumerate(wanted.labels))
        config.label2id = {label: index for index, label in enumerate(wanted.labels)}
    return config


def _override(config: Any, changes: Mapping[str, Any], where: str) -> None:
    """Changes keys of a config, and of those in it. ContractError for one that there is not."""
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


def _class_of(auto_class: str) -> Any:
    """A class of models, or an auto class that chooses one by a config."""
    import transformers

    if ":" not in auto_class:
        kind = getattr(transformers, auto_class, None)
        if inspect.isclass(kind) and hasattr(kind, "from_config") and hasattr(kind, "_model_mapping"):
            return kind
        known = [name for name in dir(transformers) if name.startswith("AutoModel")]
        raise ContractError(
            f"Transformers has no auto class {auto_class!r}",
            where="task.auto_class",
            accepted=", ".join(nearest(auto_class, known, 3) or known[:8]) + "; or module:Class",
        )
    module, _, name = auto_class.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as fault:
        raise ContractError(
            f"{auto_class!r} can not be imported: {first_line(fault)}", where="task.auto_class"
        ) from fault
    if not (inspect.isclass(kind) and issubclass(kind, transformers.PreTrainedModel)):
        raise ContractError(
            f"{auto_class!r} is no model of Transformers",
            where="task.auto_class",
            accepted="a child of transformers.PreTrainedModel",
        )
    return kind


def _made(kind: Any, config: Any, wanted: PretrainedConfig, folder: Path) -> Any:
    options: dict[str, Any] = {dtype_key(): torch.float32}
    if wanted.attn_implementation is not None:
        packed_attention.register()
        options["attn_implementation"] = wanted.attn_implementation
    automatic = hasattr(kind, "_model_mapping")
    make = kind.from_config if automatic else kind._from_config
    if automatic:
        options["trust_remote_code"] = wanted.trust_remote_code
    elif not isinstance(config, kind.config_class):
        raise _other_kind(kind, config, folder)
    try:
        with empty_parameters():
            model = make(config, **options)
        packed_attention.check(model)
        return model
    except MMError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, LookupError, ImportError, RuntimeError) as fault:
        if isinstance(fault, KeyError) and fault.args == (wanted.attn_implementation,):
            raise ContractError(
                f"the model of this folder knows no attention {wanted.attn_implementation!r}",
                where="task.attn_implementation",
                accepted="eager, sdpa: it does not let one choose any other function",
                hint="leave attn_implementation out",
            ) from fault
        if automatic and kind.__name__ in _code_of(folder):
            raise _untrusted(folder, wanted, _no_model(kind, folder, fault)) from fault
        if automatic and type(config) not in kind._model_mapping:
            raise _other_kind(kind, config, folder) from fault
        raise _no_model(kind, folder, fault) from fault


def _read_generation(model: Any, folder: Path) -> None:
    """What the folder says of the model's generation. CheckpointError where that can not be read."""
    file = folder / "generation_config.json"
    # One that the library made of config.json says no more than that, and often less.
    derived = read_mapping(file).get("_from_model_config")
    if model.can_generate() and file.is_file() and not derived:
        settings = type(model.generation_config)
        try:
            model.generation_config = settings.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, TypeError) as fault:
            raise CheckpointError(
                f"what it says of generation can not be read: {first_line(fault)}", where=str(file)
            ) from fault


def _no_model(kind: Any, folder: Path, fault: Exception) -> ContractError:
    return ContractError(
        f"{kind.__name__} makes no model of this folder: {first_line(fault)}", where=str(folder)
    )


def _code_of(folder: Path) -> Mapping[str, Any]:
    """What config.json says of Python files in the folder: auto class -> class."""
    found = read_mapping(folder / "config.json").get("auto_map")
    return found if isinstance(found, dict) else {}


def _untrusted(folder: Path, wanted: PretrainedConfig, otherwise: MMError) -> MMError:
    """The error of a folder whose code was not run; `otherwise` where there is none, or it was."""
    if wanted.trust_remote_code or not _code_of(folder):
        return otherwise
    return ContractError(
        "config.json names Python files of the folder, which are not run",
        where=str(folder),
        hint="read them, and set task.trust_remote_code: true",
    )


def _other_kind(kind: Any, config: Any, folder: Path) -> ContractError:
    listed = ", ".join(config.architectures or ())
    return ContractError(
        f"{kind.__name__} makes no model of this folder, whose config.json is of {config.model_type!r}",
        where=str(folder),
        accepted=f"an auto class for it, or its own class: {listed}" if listed else "an auto class for it",
        hint="set task.auto_class, or task.from_pretrained",
    )


def _new_parameters(model: nn.Module, wanted: PretrainedConfig, name: str) -> tuple[str, ...]:
    """What `new_modules` covers, by path in the model."""
    paths = [path for path, _ in model.named_parameters(prefix=name)]
    found = covered(wanted.new_modules, paths, "task.new_modules")
    return tuple(path.removeprefix(f"{name}.") for path in found)


# -- initialisation ------------------------------------------------------------------------------


def _prepare_initialisation(model: Any) -> None:
    """Has the engine fill the model as its authors do: tables as computed, weights as they draw them."""
    tables = {name: buffer.clone() for name, buffer in model.named_buffers()}
    # A buffer that the engine seeds as it seeds any other tensor: the rest is drawn from it.
    model.register_buffer(_SEED, torch.zeros(1, device="cpu"), persistent=False)

    def init_weights() -> None:
        _draw(model)
        for name, table in tables.items():
            model.get_buffer(name).copy_(table)

    model.init_weights = init_weights


def _draw(model: Any) -> None:
    """Draws every parameter that the engine has marked as unset (by nan), one module at a time, whole: what
    authors do to rows and to `.data` of a parameter would miss the shards."""
    seed = nn.init.uniform_(getattr(model, _SEED))
    rng = Randomness(int(float(seed) * 2**24))
    owners = _owners(model)
    # Tied weights are drawn as the first of their modules draws them: the others join it afterwards.
    first: dict[int, nn.Module] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            first.setdefault(id(parameter), module)
    for path, module in reversed(list(model.named_modules())):  # children first, as the library goes
        own = {key: p for key, p in module._parameters.items() if p is not None}
        todo = {key: p for key, p in own.items() if first[id(p)] is module and _unset(p)}
        if not todo:
            continue
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.seed32(path))
            whole = {key: nn.Parameter(torch.full(p.shape, float("nan"))) for key, p in own.items()}
            _with(module, whole, owners[path])
        for key, parameter in todo.items():
            keep_local_part(parameter, whole[key].detach())


def _owners(model: Any) -> dict[str, Callable[[nn.Module], None]]:
    """Of each module, the `_init_weights` of the innermost model that it is in."""
    from transformers import PreTrainedModel

    found: dict[str, Callable[[nn.Module], None]] = {}
    for path, module in model.named_modules():
        own = isinstance(module, PreTrainedModel)
        found[path] = module._init_weights if own else found[path.rpartition(".")[0]]
    return found


def _with(module: nn.Module, whole: Mapping[str, nn.Parameter], init: Callable[[nn.Module], None]) -> None:
    kept: Mapping[str, Any] = dict(module._parameters)
    module._parameters.update(whole)
    try:
        init(module)
    finally:
        module._parameters.update(kept)


def _unset(parameter: Tensor) -> bool:
    local: Any = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return bool(local.isnan().any())


def forward_names(model: nn.Module) -> tuple[Sequence[str], bool]:
    """(names of what the model's forward takes, whether it takes others as well)."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY or p.kind is p.POSITIONAL_OR_KEYWORD]
    return names[1:], any(p.kind is p.VAR_KEYWORD for p in parameters)
