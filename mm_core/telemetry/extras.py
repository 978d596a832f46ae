"""Packages that extras of mm-core install."""

from __future__ import annotations

import importlib
from types import ModuleType

from mm_core.errors import MMError


def package(name: str, extra: str) -> ModuleType:
    """Imports a package; MMError with the extra that installs it if it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise MMError(f"{name} is not installed", hint=f"pip install 'mm-core[{extra}]'") from None
