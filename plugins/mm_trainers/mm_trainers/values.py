"""Values of the tools as values of ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mm_core.interchange import Instead

_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
OPTIMIZERS = {
    **dict.fromkeys(("", "adamw", "torch.optim.adamw", "adamw_torch", "adamw_torch_fused"), "adamw"),
    **dict.fromkeys(("adamw_hf", "adamw_apex_fused", "adamw_torch_npu_fused"), "adamw"),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(("adam", "torch.optim.adam"), "adam"),
    **dict.fromkeys(("adamw8bit", "adamw8", "adamw_8bit", "adamw_bnb_8bit"), "adamw_8bit"),
    **dict.fromkeys(("adamw_torch_8bit", "paged_adamw_8bit", "bitsandbytes.optim.adamw8bit"), "adamw_8bit"),
    "bitsandbytes.optim.pagedadamw8bit": "adamw_8bit",
}
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine"}
SCHEDULES |= {"cosine_with_restarts": "cosine"}  # ai-toolkit's restarts after the whole run
TRANSFORMERS = SCHEDULES | {"linear": "linear", "cosine_with_min_lr": "cosine"}
_DTYPES = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}
_DTYPES |= dict.fromkeys(("fp32", "float32", "float", "no"), "fp32")


def one_of(known: Mapping[Any, Any], instead: Any = None) -> Callable[[Any], Any]:
    """A conversion of known values, in any case; of another, an error that lists them, or what is written."""

    def convert(value: Any) -> Any:
        key = value.lower() if isinstance(value, str) else value
        if key in known:
            return known[key]
        why = f"{value!r} has no counterpart here"
        if instead is not None:
            raise Instead(instead, why)
        raise ValueError(f"{why}; known: {', '.join(map(str, known))}")

    return convert


DTYPE = one_of(_DTYPES)


def always(value: Any) -> Callable[..., Any]:
    """A conversion to one value."""
    return lambda *_: value


def norm(value: Any) -> float | None:
    """The largest norm of gradients; 0 is off."""
    return float(value) or None


def times(value: Any, other: Any) -> Any:
    return value * other


def words(value: Any) -> list[str]:
    """A list of words, from one or from a text with commas."""
    parts = value if isinstance(value, list) else str(value).split(",")
    return [str(part).strip() for part in parts if str(part).strip()]


def trackers(value: Any) -> list[str]:
    known = ["tensorboard", "wandb", "mlflow"]
    return known[:2] if value == "all" else [word for word in words(value) if word in known]


def recompute(value: Any) -> str | None:
    """Which modules are recomputed."""
    return "auto" if value else None


def listed(value: Any) -> list[Any]:
    """A value as a list of one, and a list as it is."""
    return value if isinstance(value, list) else [value]


def model_name(value: Any) -> str:
    """A model's folder as its path; a name on the hub with `hub:` before it."""
    name = str(value).rstrip("/")
    return f"hub:{name}" if _HUB.fullmatch(name) and not Path(name).exists() else name
