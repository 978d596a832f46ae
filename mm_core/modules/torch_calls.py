"""What torch's overrides are given: any of its functions, and the arguments of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
