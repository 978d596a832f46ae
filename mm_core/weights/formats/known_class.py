"""The class of a model that its library exports: the model's own class, or one it is derived from."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch

from mm_core.errors import first_line

if TYPE_CHECKING:
    from diffusers import ModelMixin
    from transformers import PreTrainedModel

    LibraryModel: TypeAlias = PreTrainedModel | ModelMixin


def known_class(model: LibraryModel, library: str, base: type) -> type[LibraryModel]:
    """The nearest class of a model that Diffusers or Transformers (`library`) exports.

    A model derived only from `base` keeps its own class, which is the one that loads it.
    """
    own = type(model)
    if own.__module__.partition(".")[0] == "transformers_modules":
        return own  # code in the model's folder, which is exported with it
    for kind in own.__mro__:
        known = getattr(sys.modules[library], kind.__name__, None) is kind
        if known and kind is not base and issubclass(kind, base):
            return kind
    return own


def difference(model: LibraryModel, kind: type[LibraryModel]) -> str:
    """Why a library could not load a model's exported weights as class `kind`; "" if it can."""
    own = type(model)
    if own is kind:
        return ""
    why = _other_config(model, kind) or _other_tensors(model, kind)
    return f"{own.__name__} can no longer be loaded as {kind.__name__}: {why}" if why else ""


def _other_config(model: LibraryModel, kind: type[LibraryModel]) -> str:
    """For Diffusers: options that the class does not accept. For Transformers: a different config class."""
    wanted = getattr(kind, "config_class", None)
    if wanted is not None:
        own = type(model.config)
        return "" if own is wanted else f"its config is a {own.__name__}, not a {wanted.__name__}"
    taken = inspect.signature(kind.__init__).parameters
    added = [key for key in _fields(model) if key not in taken]
    return f"it has options of its own: {', '.join(added[:3])}" if added else ""


def _other_tensors(model: LibraryModel, kind: type[LibraryModel]) -> str:
    try:
        with torch.device("meta"):
            fresh = kind(model.config) if getattr(kind, "config_class", None) else kind(**_fields(model))
    except Exception as fault:
        return f"{kind.__name__} cannot be built with its options ({first_line(fault)})"
    wanted = {name: tuple(tensor.shape) for name, tensor in fresh.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for what, names in (
        ("adds", [name for name in found if name not in wanted]),
        ("lacks", [name for name in wanted if name not in found]),
        ("has another shape of", [n for n in wanted if n in found and found[n] != wanted[n]]),
    ):
        if names:
            return f"it {what} {', '.join(names[:3])}"
    return ""


def _fields(model: LibraryModel) -> Mapping[str, object]:
    """A Diffusers model's options, without the library's own entries beside them."""
    return {key: value for key, value in model.config.items() if not key.startswith("_")}
