"""Bytes of the model states by ZeRO stage."""

from __future__ import annotations

from mm_core.plan.model_states import model_states


def test_the_stages_divide_what_they_shard():
    rows = {r.layout: r for r in model_states(trained=1000, frozen=200, states=2, world=4)}
    fp32 = {name: (r.fp32_device, r.fp32_host) for name, r in rows.items()}
    assert fp32 == {
        "stage 0": (4800 + 4000 + 8000, 0),
        "stage 1": (4800 + 4000 + 2000, 0),
        "stage 2": (4800 + 1000 + 2000, 0),
        "stage 2, optimizer on the host": (4800, 1000 + 2000),
        "stage 3": (1200 + 1000 + 2000, 0),
        "stage 3, optimizer on the host": (1200, 1000 + 2000),
        "stage 3, all on the host": (0, 1200 + 1000 + 2000),
    }
    assert (rows["stage 0"].bf16_device, rows["stage 3"].bf16_device) == (
        2400 + 4000 + 12000,
        600 + 1000 + 3000,
    )
