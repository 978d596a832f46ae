"""The conformance kit: checks that plugin authors run against their components.

On the command line, for every component of an installed plugin: `mm plugins test my_plugin`. In pytest:

from mm_core.testing import conformance_tests

test_conformance = conformance_tests("my_plugin")
"""

from typing import TYPE_CHECKING

from mm_core.lazy import lazy_names

if TYPE_CHECKING:
    from mm_core.testing.predictors.checks import PREDICTOR_CHECKS, check_predictor
    from mm_core.testing.predictors.probe import PredictorProbe
    from mm_core.testing.suite import conformance_tests

__all__ = ["PREDICTOR_CHECKS", "PredictorProbe", "check_predictor", "conformance_tests"]

__getattr__ = lazy_names(__name__)
