"""The conformance kit of predictors."""

from __future__ import annotations

from mm_core.testing.kit import Kit, Probe
from mm_core.testing.predictor import PREDICTOR_CHECKS
from mm_core.testing.predictor_probe import PredictorProbe


def _probe(probe: Probe) -> PredictorProbe:
    return PredictorProbe(probe.build)


KIT = Kit(PREDICTOR_CHECKS, probe=_probe)
"""The conformance checks of predictors."""
