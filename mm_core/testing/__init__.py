"""The conformance kit: checks that plugin authors run against their components.

On the command line, for every component of an installed plugin: `mm plugins test my_plugin`. In pytest:

from mm_core.testing import conformance_tests

test_conformance = conformance_tests("my_plugin")
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mm_core.testing.predictors.checks import PREDICTOR_CHECKS, check_predictor
    from mm_core.testing.predictors.probe import PredictorProbe
    from mm_core.testing.suite import conformance_tests

__all__ = ["PREDICTOR_CHECKS", "PredictorProbe", "check_predictor", "conformance_tests"]

_HOMES = MappingProxyType(
    {
        "PREDICTOR_CHECKS": "predictors.checks",
        "PredictorProbe": "predictors.probe",
        "check_predictor": "predictors.checks",
        "conformance_tests": "suite",
    }
)
"""Name -> the file that defines it, imported when the name is used: the checks import torch."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
