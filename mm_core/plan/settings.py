"""Settings of a run that do not fit each other: its length, schedule and profile; a limit and its workers."""

from __future__ import annotations

from collections.abc import Iterator

from mm_core.config.sections import RunConfig
from mm_core.schema.fields import ComponentConfig


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


def profile_notes(config: RunConfig, steps: int) -> tuple[str, ...]:
    """The plan's note on a profile that begins after the run's last step; `steps` as in `check_schedule`."""
    if config.profile is None or not steps or config.profile.steps[0] <= steps:
        return ()
    first = config.profile.steps[0]
    return (f"nothing is profiled: profile.steps begins at step {first}, and the run ends at step {steps}",)


def decode_notes(config: RunConfig) -> Iterator[str]:
    """A note if clips are decoded where nothing can end a decoder."""
    values = [value for dataset in config.data.splits.values() for value in dataset.options.values()]
    clips = any(isinstance(value, ComponentConfig) and value.kind == "video_reader" for value in values)
    if clips and not config.data.loader.workers:
        yield (
            "with data.loader.workers: 0 the training process decodes, which cannot be ended:"
            " data.decode_seconds does not hold, and a decoder that hangs stops the run"
        )
