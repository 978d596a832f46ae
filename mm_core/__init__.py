"""mm_core: a training platform for multimodal models.

`import mm_core` does not import torch: the names below are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mm_core.errors import DataError, MMError
from mm_core.lazy import lazy_names
from mm_core.plugin.component import Component
from mm_core.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    from mm_core.config.load import load_config
    from mm_core.inference.answer import answer
    from mm_core.inference.evaluate import evaluate
    from mm_core.inference.sample import sample
    from mm_core.interchange.export import export
    from mm_core.loading.frozen import load_frozen
    from mm_core.plugin.registry import build
    from mm_core.training.run import train

__version__ = "0.1.0"
__all__ = [
    "Component",
    "DataError",
    "MMError",
    "__version__",
    "answer",
    "build",
    "evaluate",
    "export",
    "hookimpl",
    "load_config",
    "load_frozen",
    "sample",
    "train",
]

__getattr__ = lazy_names(__name__)
