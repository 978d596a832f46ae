"""What the engine computes is what plain torch computes, at each stage and precision, on two ranks.

The task has a frozen layer, a scalar parameter and two groups of learning rates; its rows have uneven
weights, and one has none. Gradients are clipped, and accumulated over three micro-batches of each rank.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from parity_ranks import BRANCHING, FLOAT32, HALF, HOPELESS

from support.ranks import run_ranks

pytestmark = pytest.mark.slow
LIMITS = {"fp32": 1e-6, "bf16": 2e-2, "fp16": 2e-2}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What parity_ranks.py measured, by case."""
    out = tmp_path_factory.mktemp("parity") / "measured.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        run_ranks(Path(__file__).with_name("parity_ranks.py"), 2, out)
    found: dict[str, Any] = json.loads(out.read_text("utf-8"))
    return found


@pytest.mark.parametrize(
    "case", [*FLOAT32, *(f"{dtype} {name}" for dtype in ("bf16", "fp16") for name in HALF)]
)
def test_ten_steps_are_those_of_plain_torch(measured: dict[str, Any], case: str) -> None:
    found, limit = measured[case], LIMITS[case[:4]]
    assert found["begun"] is True  # masters are not rounded as the parameters that compute are
    assert {k: v for k, v in found.items() if k in ("loss", "norm", "weights") and not v <= limit} == {}


@pytest.mark.parametrize("case", [*BRANCHING, *(f"bf16 {name}" for name in HALF)])
def test_a_parameter_without_a_gradient_in_a_step_or_a_micro_batch_has_the_gradient_zero(
    measured: dict[str, Any], case: str
) -> None:
    test_ten_steps_are_those_of_plain_torch(measured, f"{case}, branching")


@pytest.mark.parametrize("case", [*FLOAT32, *(f"bf16 {name}" for name in HALF)])
def test_a_poisoned_step_is_seen_and_leaves_nothing(measured: dict[str, Any], case: str) -> None:
    """A NaN loss makes the norm not finite; after `discard` the ten steps are those of plain torch."""
    assert measured[case]["poisoned norm"] in ("nan", "inf")
    assert measured[case]["unchanged"] is True
    assert measured[case]["frozen"] <= (0 if case.startswith("fp32") else 2**-8)


@pytest.mark.parametrize("name", HALF)
def test_an_overflow_halves_the_loss_scale_and_training_goes_on_and_resumes(
    measured: dict[str, Any], name: str
) -> None:
    found = measured[f"fp16 {name}"]
    overflow = found["overflow"]
    assert overflow["loss"] < float("inf") and overflow["norm"] in ("nan", "inf")
    assert "beyond float16 at the loss scale 256, which is now 128" in overflow["sentence"]
    assert overflow["scales"] == [256, 128] and overflow["unchanged"] is True
    assert found["last scales"] == [128, 128] and found["resumed"] is True


@pytest.mark.parametrize("name", HOPELESS)
def test_an_overflow_at_a_scale_that_cannot_be_lowered_is_no_overflow(
    measured: dict[str, Any], name: str
) -> None:
    """The run ends as with any norm that is not finite."""
    found = measured[f"hopeless {name}"]
    assert found == {"norm": "inf", "sentence": None, "unchanged": True}
