"""The schedulers of Wan pipelines."""

from __future__ import annotations

from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)

FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}


def of_diffusers(solver: str, shift: float = 5.0, **settings):
    """The scheduler as a Wan pipeline has it, from Diffusers alone."""
    if solver == "euler":
        return FlowMatchEulerDiscreteScheduler(shift=shift, **settings)
    cls = UniPCMultistepScheduler if solver == "unipc" else DPMSolverMultistepScheduler
    return cls(**FLOW, flow_shift=shift, **settings)
