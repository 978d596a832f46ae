"""Every JSON file that is accepted trains."""

from __future__ import annotations

import pytest
from json_cases import ACCEPTED, FOLDER, facts_of
from mm_deepspeed.engine import DeepSpeedEngine

from mm_core.runtime.process_group import process_group
from mm_core.testing.training.engines.task import Plain, Trial, network_values

TOLERANCE = {"fp32": 1e-6, "fp16": 2e-2, "bf16": 2e-2}


@pytest.mark.slow
@pytest.mark.parametrize("name", ACCEPTED)
def test_an_accepted_file_trains_as_plain_torch_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.accelerator import get_accelerator

    # The accelerator of CPUs refuses fp16, which this CPU computes.
    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda _: True)
    engine = DeepSpeedEngine(config=str(FOLDER / f"{name}.json"))
    values = network_values()
    plain = Plain(values=values)
    with process_group():
        engine.check_training(facts_of(name))
        trial = Trial(engine, values=values)
        for step in range(3):
            wanted = pytest.approx(plain.step(step), rel=TOLERANCE[engine.settings.dtype])
            assert trial.step(step) == wanted
