"""What the length of a run must fit: its learning-rate schedule."""

from __future__ import annotations

from mm_core.config.sections import RunConfig


def check_schedule(config: RunConfig, steps: int) -> None:
    """Builds the learning-rate schedule of a run, so that one that does not fit it is found at the plan.

    Args:
        config: the run's config.
        steps: steps of the whole run; 0: they are unknown.

    Raises:
        MMError: the schedule refuses the run, such as one that is shorter than the warm-up.
    """
    rate = config.optimizer.options.get("lr")  # without this option, only the engine knows the base rate
    if steps and isinstance(rate, int | float):
        config.registry.build("lr_schedule", config.lr_schedule, steps, float(rate))
