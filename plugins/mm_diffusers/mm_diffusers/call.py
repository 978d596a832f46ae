"""The pipeline's own code prepares the call of its transformer, where a stand-in stops it."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from mm_core.contracts import ContextPlan, empty_parameters
from mm_diffusers.folder import PipelineFolder


class Stop(Exception):
    """Ends a pipeline's call where it calls the transformer.

    Attributes:
        args: positional arguments of the transformer.
        named: the others.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args)
        self.named = named


class StandIn:
    """Takes the transformer's place in a pipeline: has its config and attributes; calling it raises `Stop`.

    In float32 whatever the transformer's dtype: the pipeline computes times in the dtype of latents.
    """

    dtype = torch.float32

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.forward = model.forward  # pipelines look at its parameters

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_model"), name)  # without one while it is copied

    def __call__(self, *args: Any, **named: Any) -> Any:
        raise Stop(*args, **named)

    def cache_context(self, *args: Any, **named: Any) -> Any:
        """Nothing is cached."""
        return nullcontext()


class _Once:
    """A scheduler with one step, whose time is a tensor [B]."""

    order = 1
    init_noise_sigma = 1.0

    def __init__(self, timestep: Tensor, config: Any) -> None:
        self.timesteps = [timestep]
        self.sigmas = timestep[None]
        self.config = config

    def set_timesteps(
        self, num_inference_steps: int = 1, device: Any = None, sigmas: Any = None, mu: Any = None
    ) -> None:
        """As a scheduler; the time stays."""

    def set_begin_index(self, begin_index: int = 0) -> None:
        """As a scheduler."""

    def scale_model_input(self, sample: Tensor, *args: Any) -> Tensor:
        """As a scheduler: unchanged."""
        return sample


class PipelineCall:
    """A pipeline without weights, which prepares the calls of its transformer.

    Args:
        folder: of the pipeline.
        transformer: the real module, or one on the meta device: its config and `forward` are read.
    """

    def __init__(self, folder: PipelineFolder, transformer: nn.Module) -> None:
        self.folder, self.family = folder, folder.family
        self.pipe = bare(folder, self.family.call or folder.kind, transformer=StandIn(transformer))
        self._config = self.pipe.scheduler.config
        self._names = tuple(inspect.signature(transformer.forward).parameters)
        self._takes = inspect.signature(type(self.pipe).__call__).parameters

    def sizes(self, shape: Sequence[int]) -> dict[str, int]:
        """The size of latents [B,C,T,H,W] in frames and pixels, as arguments of the call."""
        (time, space), fold = self.family.strides, 2 if self.family.folded else 1
        height, width = (fold * size * int(getattr(self.pipe, space)) for size in shape[3:])
        found = {"height": height, "width": width, "max_area": height * width}
        if time:
            found["num_frames"] = (shape[2] - 1) * int(getattr(self.pipe, time)) + 1
        return {name: value for name, value in found.items() if name in self._takes}

    def prepare(self, latents: Tensor, timestep: Tensor, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the transformer's forward, by name.

        Args:
            latents: in the form of the family's `latents`, float32.
            timestep: [B] from 0 to 1000, float32.
            given: further arguments of the pipeline's call: the encoded captions and the size in pixels.
        """
        stop = self._run(_Once(timestep, self._config), latents, given, 1)
        named = {**dict(zip(self._names, stop.args, strict=False)), **stop.named}
        return {name: value for name, value in named.items() if name != "return_dict"}

    def schedule(
        self, latents: Tensor, given: Mapping[str, Any], steps: int
    ) -> tuple[Any, Mapping[str, Any]]:
        """The pipeline's scheduler with its times for `steps` steps, and what the pipeline set them by (mu).

        Args:
            latents: see `prepare`; their size alone matters.
            given: see `prepare`.
            steps: of sampling.
        """
        scheduler = scheduler_of(self.folder)
        set_timesteps = scheduler.set_timesteps
        noted: dict[str, Any] = {}

        @functools.wraps(set_timesteps)  # pipelines look at its parameters
        def noting(*args: Any, **named: Any) -> Any:
            noted.update(named)
            return set_timesteps(*args, **named)

        scheduler.set_timesteps = noting
        self._run(scheduler, latents, given, steps)
        return scheduler, noted

    def _run(self, scheduler: Any, latents: Tensor, given: Mapping[str, Any], steps: int) -> Stop:
        pipe = self.pipe
        pipe.scheduler, type(pipe).where = scheduler, latents.device
        try:
            with quiet(type(pipe)):
                pipe(latents=latents, num_inference_steps=steps, **given, **self.family.off)
        except Stop as stop:
            return stop
        raise AssertionError(f"{self.folder.kind} did not call its transformer")


def bare(folder: PipelineFolder, kind: str, **parts: Any) -> Any:
    """A pipeline of a class with its VAE on the meta device and the given parts; the others are None. Its
    device is the class attribute `where`."""
    base = getattr(diffusers, kind)
    own = {"where": torch.device("cpu"), "_execution_device": property(_where)}
    class_ = type(base.__name__, (base,), own)
    taken = inspect.signature(base.__init__).parameters
    built = {name: None for name in taken if name in folder.index and name not in folder.settings}
    if "vae" in taken and "vae" not in parts:
        built["vae"] = empty_model(folder, "vae")
    built |= {name: value for name, value in folder.settings.items() if name in taken}
    built["scheduler"] = scheduler_of(folder)
    if "guider" in taken:
        with quiet(diffusers.guiders.BaseGuidance):
            built["guider"] = diffusers.ClassifierFreeGuidance(enabled=False)
    with quiet(base):
        pipe = class_(**{**built, **parts})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _where(pipe: Any) -> torch.device:
    found: torch.device = type(pipe).where
    return found


def empty_model(folder: PipelineFolder, part: str) -> Any:
    """A model of the pipeline without memory for its parameters."""
    kind = getattr(diffusers, folder.parts[part][1])
    with empty_parameters():
        return kind.from_config(dict(folder.config(part))).eval()


def scheduler_of(folder: PipelineFolder) -> Any:
    """A new scheduler of the pipeline."""
    return getattr(diffusers, folder.parts["scheduler"][1]).from_pretrained(
        folder.path / "scheduler", local_files_only=True
    )


@contextmanager
def quiet(kind: type) -> Iterator[None]:
    """Without the pipeline's warnings, which are about its users' arguments."""
    logger = logging.getLogger(kind.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def context_plan(model: Any, text: Collection[str | int]) -> ContextPlan:
    """The plan of the predictor whose part `transformer` the model is, for context parallelism.

    Args:
        model: with a `_cp_plan`.
        text: what of it belongs to the tokens of text, which attend in one sequence with the picture's; ():
            cross-attention (`attn2`) reads the text, all of it on each rank.
    """
    split: dict[str, dict[str | int, int]] = {}
    gather: dict[str, int] = {}
    for pattern, what in model._cp_plan.items():
        own = pattern.removesuffix(".*")
        each = [f"{own}.{name}" for name, _ in model.get_submodule(own).named_children()]
        for path in each if own != pattern else [own]:
            place = f"transformer.{path}".removesuffix(".")
            if isinstance(what, dict):
                own_text = () if text else [key for key in what if str(key).startswith("encoder_")]
                dims = {key: one.split_dim for key, one in what.items() if key not in own_text}
                split[place] = {**split.get(place, {}), **dims}
            else:
                gather[place] = what.gather_dim
    attention = [
        f"transformer.{path}"
        for path, module in model.named_modules()
        if hasattr(module, "processor") and (text or not path.endswith(".attn2"))
    ]
    masked = any("mask" in str(key) for dims in split.values() for key in dims)
    heads = int(model.config.num_attention_heads)
    return ContextPlan(heads, tuple(attention), split, gather, text, ring=not masked)
