"""The hooks of mm_core. A plugin module implements any of them and returns a list of `Component`.

Each hook's docstring states how the core calls the target of such a component: `fields` are the component's
config fields, passed by keyword. The hooks page of the documentation is generated from this file.
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
    """Predictors, the networks that a diffusion task trains: `target(**fields)` ->
    `mm_core.contracts.Predictor`.

    The capability `compiles: True` declares that torch.compile takes the forward as one graph: the
    conformance kit then checks it.
    """


@hookspec
def mm_autoencoders() -> Iterable[Component]:
    """Autoencoders, from pixels to latents and back: `target(**fields)` ->
    `mm_core.contracts.Autoencoder`."""


@hookspec
def mm_text_encoders() -> Iterable[Component]:
    """Text encoders, from captions to hidden states: `target(**fields)` ->
    `mm_core.contracts.TextEncoder`."""


@hookspec
def mm_image_encoders() -> Iterable[Component]:
    """Image encoders, from images to hidden states: `target(**fields)` ->
    `mm_core.contracts.ImageEncoder`."""


@hookspec
def mm_schedulers() -> Iterable[Component]:
    """Noise schedules: `target(**fields)` -> `mm_core.contracts.NoiseScheduler`."""


@hookspec
def mm_datasets() -> Iterable[Component]:
    """Datasets of training samples: `target(**fields)` -> `mm_core.contracts.Dataset`."""


@hookspec
def mm_tasks() -> Iterable[Component]:
    """Tasks, which compute the loss of a training step: `target(**fields)` -> `mm_core.contracts.Task`.

    Fields that are components themselves are built before the target is called.
    """


@hookspec
def mm_engines() -> Iterable[Component]:
    """Engines, which spread a task over devices: `target(**fields)` -> `mm_core.contracts.Engine`.

    The capability `cpu: False` declares that the engine runs on accelerators only: the conformance checks
    then do not apply on the CPU.
    """


@hookspec
def mm_optimizers() -> Iterable[Component]:
    """Optimizers: `target(groups, **fields)` -> `torch.optim.Optimizer`.

    `groups` is a list of torch parameter groups: `{"params": [...], "names": [...]}` and, if the config sets
    them, `weight_decay` and `lr_scale` (which the engine applies). `names` are the paths in the task.
    `step(closure=None)` updates them in place, with the `lr` that each group has at that step. All state is
    tensors in `self.state[parameter]`: a checkpoint holds nothing else.
    On several ranks parameters may be DTensors; their state is then sharded as they are (`zeros_like`).
    The capability `state_tensors` is the number of tensors of a parameter's size that the optimizer keeps
    (2 for AdamW); the plan's memory estimate uses it.
    """


@hookspec
def mm_lr_schedules() -> Iterable[Component]:
    """Learning-rate schedules: `target(total_steps, base_lr, **fields)` -> `mm_core.contracts.LRSchedule`."""


@hookspec
def mm_trackers() -> Iterable[Component]:
    """Trackers, which receive metrics and clips: `target(run_dir, **fields)` ->
    `mm_core.contracts.Tracker` (on rank 0)."""


@hookspec
def mm_video_readers() -> Iterable[Component]:
    """Video decoders: `target(**fields)` -> `mm_core.contracts.VideoReader`."""


@hookspec
def mm_transforms() -> Iterable[Component]:
    """Transforms of decoded frames into pixels: `target(**fields)` -> `mm_core.contracts.Transform`."""


@hookspec
def mm_weight_formats() -> Iterable[Component]:
    """Formats of weights on disk: `target()` -> `mm_core.weights.WeightFormat`.

    The core checks which formats recognise a folder and can store a component, and takes the one whose
    tensor names match best.
    """


@hookspec
def mm_metrics() -> Iterable[Component]:
    """Metrics of held-out samples: `target(**fields)` -> `mm_core.contracts.Metric` (on every rank)."""


@hookspec
def mm_callbacks() -> Iterable[Component]:
    """Callbacks at events of a run: `target(**fields)` -> `mm_core.contracts.Callback` (on every rank)."""


KINDS: Mapping[str, str] = MappingProxyType(
    {hook.removeprefix("mm_").removesuffix("s"): hook for hook in dict(globals()) if hook.startswith("mm_")}
)
"""Kind of component -> the hook that lists components of that kind."""
