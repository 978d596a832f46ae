"""The hooks of mm_core. A plugin module answers any of them with a list of `Component`.

Each hook's docstring states how the core calls the target of such a component: `fields` stands for
the component's config fields, passed by keyword. The hooks page of the documentation is made from
this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import pluggy

from mm_core.plugin.component import Component

hookspec = pluggy.HookspecMarker("mm_core")
hookimpl = pluggy.HookimplMarker("mm_core")


@hookspec
def mm_predictors() -> Iterable[Component]:
    """Networks that a diffusion task trains: `target(**fields)` -> `mm_core.contracts.Predictor`."""


@hookspec
def mm_autoencoders() -> Iterable[Component]:
    """Pixel <-> latent codecs: `target(**fields)` -> `mm_core.contracts.Autoencoder`."""


@hookspec
def mm_text_encoders() -> Iterable[Component]:
    """Captions -> hidden states: `target(**fields)` -> `mm_core.contracts.TextEncoder`."""


@hookspec
def mm_image_encoders() -> Iterable[Component]:
    """Images -> hidden states: `target(**fields)` -> `mm_core.contracts.ImageEncoder`."""


@hookspec
def mm_schedulers() -> Iterable[Component]:
    """Noise schedules: `target(**fields)` -> `mm_core.contracts.NoiseScheduler`."""


@hookspec
def mm_datasets() -> Iterable[Component]:
    """Training samples: `target(**fields)` -> `mm_core.contracts.Dataset`."""


@hookspec
def mm_tasks() -> Iterable[Component]:
    """What is computed in a step: `target(**fields)` -> `mm_core.contracts.Task`.

    Fields that are components themselves arrive built.
    """


@hookspec
def mm_engines() -> Iterable[Component]:
    """How a task is spread over devices: `target(**fields)` -> `mm_core.contracts.Engine`."""


@hookspec
def mm_optimizers() -> Iterable[Component]:
    """Update rules: `target(groups, **fields)` -> `torch.optim.Optimizer`.

    `groups` is a list of torch parameter groups: `{"params": [...], "names": [...]}` and, where the run
    says so, `weight_decay` and `lr_scale` (which the engine reads). `names` are the paths in the task.
    The capability `state_tensors` says how many tensors of a parameter's size the optimizer keeps
    (2 for AdamW); the plan's memory estimate reads it.
    """


@hookspec
def mm_lr_schedules() -> Iterable[Component]:
    """Learning-rate schedules: `target(total_steps, base_lr, **fields)` -> `mm_core.contracts.LRSchedule`."""


@hookspec
def mm_trackers() -> Iterable[Component]:
    """Where metrics go: `target(run_dir, **fields)` -> `mm_core.contracts.Tracker` (on rank 0)."""


@hookspec
def mm_video_readers() -> Iterable[Component]:
    """Video decoders: `target(**fields)` -> `mm_core.contracts.VideoReader`."""


@hookspec
def mm_weight_formats() -> Iterable[Component]:
    """Layouts of weights on disk: `target()` -> `mm_core.weights.WeightFormat`.

    Formats are asked in turn whether they recognise a folder and can hold a component; the one whose
    names fit best is taken.
    """


@hookspec
def mm_metrics() -> Iterable[Component]:
    """Figures of held-out samples: `target(**fields)` -> `mm_core.contracts.Metric` (on every rank)."""


@hookspec
def mm_callbacks() -> Iterable[Component]:
    """Observers of a run: `target(**fields)` -> `mm_core.contracts.Callback` (on every rank)."""


KINDS: Mapping[str, str] = MappingProxyType(
    {hook.removeprefix("mm_").removesuffix("s"): hook for hook in dict(globals()) if hook.startswith("mm_")}
)
"""Each kind of component and the hook that lists the components of that kind."""
