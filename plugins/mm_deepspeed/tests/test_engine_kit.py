"""The engine keeps the contract of engines at each stage, in one process and on two ranks."""

from collections.abc import Mapping

import pytest

from support.conformance import examined

STAGES: Mapping[str, dict[str, object]] = {
    "1": {"stage": 1},
    "2 offloaded": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "3": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
"""The others are compared with plain torch in test_parity.py."""


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_the_engine_keeps_the_contract_of_engines(stage: str) -> None:
    settings = {"zero_optimization": STAGES[stage]}
    examination = examined("deepspeed/deepspeed", tiny={"settings": settings})
    assert not [f"{o.check}: {o.reason}" for o in examination if o.status == "failed"]
