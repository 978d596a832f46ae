"""Types for torch's overrides: a function and its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
