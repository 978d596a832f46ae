"""The conformance kit: checks that plugin authors run against their components with pytest.

from mm_core.testing import check_predictor

def test_my_dit_keeps_the_contract():
    check_predictor(lambda: MyDiT(num_layers=2, ...))
"""

from mm_core.testing.predictor import PREDICTOR_CHECKS, check_predictor
from mm_core.testing.predictor_probe import PredictorProbe

__all__ = ["PREDICTOR_CHECKS", "PredictorProbe", "check_predictor"]
