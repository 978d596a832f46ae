"""The conformance kit: checks that plugin authors run against their components.

On the command line, for every component of an installed plugin: `mm plugins test my_plugin`. In pytest:

from mm_core.testing import conformance_tests

test_conformance = conformance_tests("my_plugin")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mm_core.testing.predictor import PREDICTOR_CHECKS, PredictorProbe, check_predictor
    from mm_core.testing.suite import conformance_tests

__all__ = ["PREDICTOR_CHECKS", "PredictorProbe", "check_predictor", "conformance_tests"]


def __getattr__(name: str) -> Any:
    # The checks import torch, which the command that lists them does without.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "suite" if name == "conformance_tests" else "predictor"
    return getattr(import_module(f"{__name__}.{module}"), name)
