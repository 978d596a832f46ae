"""The kinds of components: a hook each, under the record of all that the core knows of the kind.

A plugin module implements any of the hooks and returns a list of `Component`. Each hook's docstring states
how the core calls the target of such a component: `fields` are the component's config fields, passed by
keyword. Its last line leads to the page that users of such components read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import pluggy

from mm_core.plugin.component import Component
from mm_core.plugin.kinds import RECORD, ComponentKind
from mm_core.plugin.scaffold.runs import CLIPS, CLIPS_IN_FILES, VALIDATION, WAN

hookimpl = pluggy.HookimplMarker("mm_core")


def _capabilities(*names: str) -> tuple[str, ...]:
    return tuple(f"mm_core.contracts:{name}" for name in names)


_LOADING = _capabilities("SelfLoading", "Streamed", "SupportsFiles")  # what frozen components have


@ComponentKind(
    "mm_core.contracts:Predictor",
    base="torch.nn:Module",
    by_name=("forward", "module_flops"),
    optional=_capabilities(
        *("SupportsConditionShapes", "SupportsContextPlan", "SupportsExperts", "SupportsFrames"),
        *("SupportsGuided", "SupportsInputs", "SupportsMaxFrames", "SupportsModuleFlops"),
        *("SupportsShardPlan", "SupportsWeightsFrom"),
    ),
    kit="mm_core.testing.predictors.checks:KIT",
    target="DiT",
    words="a diffusion transformer",
    tiny={"in_channels": 4, "text_dim": 8, "width": 24, "depth": 2, "heads": 2},
    run={"task.predictor": "{type: $type, in_channels: 12, text_dim: 64, patch_size: [8, 1, 1]}"},
    steps=1500,
)
def mm_predictors() -> Iterable[Component]:
    """Predictors, the networks that a diffusion task trains: `target(**fields)` ->
    `mm_core.contracts.Predictor`.

    The capability `compiles: True` declares that torch.compile takes the forward as one graph: the
    conformance kit then checks it.

    See [Write a DiT](writing-a-dit.md): a predictor, step by step.
    """


@ComponentKind(
    "mm_core.contracts:Autoencoder",
    optional=(*_LOADING, *_capabilities("SupportsDoSample", "SupportsPosterior")),
    kit="mm_core.testing.frozen.autoencoders:KIT",
    target="Haar",
    run={"task.autoencoder": "{type: $type}  # 12 channels"},
)
def mm_autoencoders() -> Iterable[Component]:
    """Autoencoders, from pixels to latents and back: `target(**fields)` ->
    `mm_core.contracts.Autoencoder`.

    See [Wan](wan.md): how a published autoencoder is used.
    """


@ComponentKind(
    "mm_core.contracts:TextEncoder",
    optional=(*_LOADING, *_capabilities("SupportsCaptions", "SupportsConditionShapes", "SupportsReads")),
    kit="mm_core.testing.frozen.encoders:TEXT",
    target="Words",
    tiny={"hidden_size": 16},
    run={"task.text_encoder": "{type: $type, hidden_size: 64}"},
)
def mm_text_encoders() -> Iterable[Component]:
    """Text encoders, from captions to hidden states: `target(**fields)` ->
    `mm_core.contracts.TextEncoder`.

    See [Write a DiT](writing-a-dit.md#conditions): conditions of a predictor.
    """


@ComponentKind(
    "mm_core.contracts:ImageEncoder",
    optional=_LOADING,
    kit="mm_core.testing.frozen.encoders:IMAGE",
    target="Colours",
    tiny={"hidden_size": 16},
    run={"task.predictor": WAN, "task.image_encoder": "{type: $type, hidden_size: 64}"},
)
def mm_image_encoders() -> Iterable[Component]:
    """Image encoders, from images to hidden states: `target(**fields)` ->
    `mm_core.contracts.ImageEncoder`.

    See [Image to video](data.md#image-to-video): where images come from.
    """


@ComponentKind(
    "mm_core.contracts:NoiseScheduler",
    optional=_capabilities("SupportsForTokens", "SupportsTruncated"),
    kit="mm_core.testing.schedulers:KIT",
    target="Flow",
    words="a noise scheduler",
    run={"task.scheduler": "{type: $type}"},
)
def mm_schedulers() -> Iterable[Component]:
    """Noise schedules: `target(**fields)` -> `mm_core.contracts.NoiseScheduler`.

    See [Sampling](sampling.md): solvers, steps, guidance.
    """


@ComponentKind(
    "mm_core.contracts:Dataset",
    optional=_capabilities(
        *("SupportsSampleAt", "SupportsLengths", "SupportsClassNames", "SupportsCheckMicroBatch"),
        *("SupportsEvaluated", "SupportsConversing", "SupportsBatchSpecs", "SupportsRowSizes"),
        *("SupportsSources", "SupportsRendered", "SupportsPictures", "SupportsWork"),
    ),
    kit="mm_core.testing.data.datasets:KIT",
    target="Stripes",
    words="a dataset of clips",
    tiny={"num_frames": 4, "height": 8, "width": 16, "clips": 6},
    run={"data.train": "{type: $type, " + CLIPS + "}"},
)
def mm_datasets() -> Iterable[Component]:
    """Datasets of training samples: `target(**fields)` -> `mm_core.contracts.Dataset`.

    See [Data](data.md): datasets, loading, sampling.
    """


@ComponentKind(
    "mm_core.contracts:Task",
    base="torch.nn:Module",
    optional=_capabilities(
        *("SupportsBeginStep", "SupportsNotes", "SupportsCheckRequest", "SupportsClips"),
        *("SupportsSampleFlops", "SupportsSampleForward", "SupportsAnswer", "SupportsCache"),
    ),
    kit="mm_core.testing.training.tasks.checks:KIT",
    target="NextFrame",
    tiny={"width": 4},
    declaration='examples="$package.task:examples"',
    run={"task": "{type: $type}"},
)
def mm_tasks() -> Iterable[Component]:
    """Tasks, which compute the loss of a training step: `target(**fields)` -> `mm_core.contracts.Task`.

    Fields that are components themselves are built before the target is called.

    See [Write a task](writing-a-task.md): a task and a dataset, step by step.
    """


@ComponentKind(
    "mm_core.contracts:Engine",
    optional=_capabilities(
        *("SupportsCheckTraining", "SupportsOverflowed", "SupportsStandIn", "SupportsUpdate"),
    ),
    kit="mm_core.testing.training.engines.checks:KIT",
    target="ReplicatedEngine",
    tiny={"recompute_modules": ["net.blocks.{*}"]},
    run={"engine": '{type: $type, recompute_modules: ["predictor.blocks.{*}"]}'},
)
def mm_engines() -> Iterable[Component]:
    """Engines, which spread a task over devices: `target(**fields)` -> `mm_core.contracts.Engine`.

    The capability `cpu: False` declares that the engine runs on accelerators only: the conformance checks
    then do not apply on the CPU.

    See [The engine](engine.md): what the shipped one does.
    """


@ComponentKind(
    "mm_core.contracts:Optimizer",
    base="torch.optim:Optimizer",
    kit="mm_core.testing.training.optimizers:KIT",
    leading=1,
    target="Lion",
    declaration='capabilities={"state_tensors": 1}',
    run={"optimizer": "{type: $type, lr: 3.0e-4}"},
)
def mm_optimizers() -> Iterable[Component]:
    """Optimizers: `target(groups, **fields)` -> `torch.optim.Optimizer`.

    `groups` is a list of torch parameter groups: `{"params": [...], "names": [...]}` and, if the config sets
    them, `weight_decay` and `lr_scale` (which the engine applies). `names` are the paths in the task.
    `step(closure=None)` updates them in place, with the `lr` that each group has at that step. All state is
    tensors in `self.state[parameter]`: a checkpoint holds nothing else.
    On several ranks parameters may be DTensors; their state is then sharded as they are (`zeros_like`).
    The capability `state_tensors` is the number of tensors of a parameter's size that the optimizer keeps
    (2 for AdamW); the plan's memory estimate uses it.

    See [Optimizers, schedules, EMA](optimizers.md): the shipped ones.
    """


@ComponentKind(
    "mm_core.contracts:LRSchedule",
    kit="mm_core.testing.small_kinds:LR_SCHEDULE",
    leading=2,
    target="InverseSquareRoot",
    words="a learning-rate schedule",
    tiny={"warmup_steps": 4},
    run={"lr_schedule": "{type: $type, warmup_steps: 50}"},
)
def mm_lr_schedules() -> Iterable[Component]:
    """Learning-rate schedules: `target(total_steps, base_lr, **fields)` -> `mm_core.contracts.LRSchedule`.

    See [Optimizers, schedules, EMA](optimizers.md): the shipped ones.
    """


@ComponentKind(
    "mm_core.contracts:Tracker",
    kit="mm_core.testing.small_kinds:TRACKER",
    leading=1,
    target="CsvTracker",
    run={"log": "{every: 1, trackers: [{type: $type}]}"},
)
def mm_trackers() -> Iterable[Component]:
    """Trackers, which receive metrics and clips: `target(run_dir, **fields)` ->
    `mm_core.contracts.Tracker` (on rank 0).

    See [Trackers](trackers.md): the shipped ones.
    """


@ComponentKind(
    "mm_core.contracts:VideoReader",
    optional=_capabilities("SupportsStream"),
    kit="mm_core.testing.data.video_readers:KIT",
    target="PatientReader",
    tiny={"pause": 0.0},
    run={"data.train": f"{CLIPS_IN_FILES}\nreader: {{type: $type}}"},
)
def mm_video_readers() -> Iterable[Component]:
    """Video decoders: `target(**fields)` -> `mm_core.contracts.VideoReader`.

    See [Data](data.md): datasets, loading, sampling.
    """


@ComponentKind(
    "mm_core.contracts:Transform",
    optional=_capabilities("SupportsFrameByFrame", "SupportsLevels"),
    kit="mm_core.testing.data.transforms:KIT",
    target="WithoutBars",
    tiny={"darkest": 8},
    run={"data.train": f"{CLIPS_IN_FILES}\ntransform: {{type: $type}}"},
)
def mm_transforms() -> Iterable[Component]:
    """Transforms of decoded frames into pixels: `target(**fields)` -> `mm_core.contracts.Transform`.

    See [Data](data.md#transforms): what the shipped one does.
    """


@ComponentKind(
    "mm_core.weights:WeightFormat",
    kit="mm_core.testing.outputs.weight_formats:KIT",
    target="Renamed",
    then="mm export --run runs/${type}_weight_format --out exported --to $type",
    declaration='examples="$package.weight_format:examples"',
)
def mm_weight_formats() -> Iterable[Component]:
    """Formats of weights on disk: `target()` -> `mm_core.weights.WeightFormat`.

    The core checks which formats recognise a folder and can store a component, and takes the one whose
    tensor names match best.

    See [Weights in and out](weights.md): import and export.
    """


@ComponentKind(
    "mm_core.contracts:Metric",
    kit="mm_core.testing.small_kinds:METRIC",
    target="Outliers",
    run={**VALIDATION, "validation": "{every: 50, metrics: [{type: $type}]}"},
)
def mm_metrics() -> Iterable[Component]:
    """Metrics of held-out samples: `target(**fields)` -> `mm_core.contracts.Metric` (on every rank).

    See [Validation](validation.md#metrics): metrics of held-out samples.
    """


@ComponentKind(
    "mm_core.contracts:Callback",
    base="mm_core.contracts:Callback",
    events=True,
    kit="mm_core.testing.small_kinds:CALLBACK",
    target="BestLoss",
    run={**VALIDATION, "validation": "{every: 50}", "callbacks": "[{type: $type}]"},
)
def mm_callbacks() -> Iterable[Component]:
    """Callbacks at events of a run: `target(**fields)` -> `mm_core.contracts.Callback` (on every rank).

    See [Steering a run](steering.md): events of a run.
    """


@ComponentKind(
    "mm_core.interchange:Migration",
    optional=("mm_core.interchange:SupportsKeys",),
    kit="mm_core.testing.migrations:KIT",
    target="SmallTrainer",
    words="a migration of another tool's runs",
    declaration='examples="$package.migration:examples"',
    then="mm migrate settings.json --out run.yaml",
)
def mm_migrations() -> Iterable[Component]:
    """Migrations, which read the runs of another tool: `target()` -> `mm_core.interchange.Migration`.

    `mm migrate` takes the one that recognises the files.

    See [Coming from another tool](migrate.md): what `mm migrate` prints.
    """


COMPONENT_KINDS: Mapping[str, ComponentKind] = MappingProxyType(
    {
        name.removeprefix("mm_").removesuffix("s"): vars(hook)[RECORD]
        for name, hook in dict(globals()).items()
        if name.startswith("mm_")
    }
)
"""Kind of component -> its record."""

KINDS: Mapping[str, str] = MappingProxyType({kind: f"mm_{kind}s" for kind in COMPONENT_KINDS})
"""Kind of component -> the hook that lists components of that kind."""
