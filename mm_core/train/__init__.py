"""Training: the loop, its parts, the run around it, and the launcher of its ranks.

The package can be called: `mm_core.train(config)` is `mm_core.train.run.train`. Python puts a package into
its parent under its name as soon as anything in it is imported, where the function of the same name was.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from mm_core.train.run import train

        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
