"""The small predictor of the conformance checks, and inputs that match it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from mm_core.contracts import ClipSize, Input, Randomness, SupportsFrames, SupportsInputs, SupportsMaxFrames
from mm_core.errors import ContractError
from mm_core.plugin.checks.contract import check_object
from mm_core.plugin.registry import build as build_component
from mm_core.tasks.text_to_video.conditions import Conditions
from mm_core.testing.kit import NotApplicable
from mm_core.testing.tensors import fill

_STRIDES = tuple(product((1, 4, 8), (8, 16, 32, 4, 2)))
"""Frames and pixels of a step of latents, the first of those at which most fits is used."""
_FEATURES = 3  # of each image that an image encoder encodes

Build = Callable[[], object] | Mapping[str, object] | str
"""A function that creates a small predictor, or an argument for `mm_core.build("predictor", ...)`."""


class PredictorProbe:
    """Builds a new predictor and matching inputs for each conformance check.

    Args:
        build: creates the predictor, with a small config.
        patches: tokens of the test clips along (t, h, w); None: (2, 3, 2), with fewer frames for a predictor
            that takes fewer (`SupportsMaxFrames`).
        text_length: tokens of the test captions.
        conditions: name -> shape of one sample's tensor, or the tensor itself, for conditions whose shape the
            predictor does not declare (`SupportsConditionShapes`). Tensors of shapes are drawn at random.
        place: names the predictor in errors; None: what `build` is.
    """

    def __init__(
        self,
        build: Build,
        patches: tuple[int, int, int] | None = None,
        text_length: int = 6,
        conditions: Mapping[str, Sequence[int] | Tensor] | None = None,
        place: str | None = None,
    ) -> None:
        self._source = build
        name = build if isinstance(build, str) else build.get("type") if isinstance(build, Mapping) else None
        made = f"made by {getattr(build, '__qualname__', build)}" if name is None else f"{name!r}"
        self.place = place or f"predictor {made}"
        self.patches = patches
        self.text_length = text_length
        self.conditions = conditions or {}
        self.compiles = False
        """Whether the component declares that torch.compile takes its forward."""
        self.outcomes: Any = None
        """What the ranks of `mm_core.testing.predictors.sharded` have found, or their error."""

    def build(self) -> object:
        """Builds a new predictor."""
        return self._source() if callable(self._source) else build_component("predictor", self._source)

    def expect(self, holds: object, what: str, accepted: str | None = None, hint: str | None = None) -> None:
        """Raises a ContractError that names the predictor unless `holds` is true: see `Probe.expect`."""
        if not holds:
            raise ContractError(what, where=self.place, accepted=accepted, hint=hint)

    def require(self, found: object, capability: Any) -> None:
        """Raises NotApplicable for an object without a capability: see `Probe.require`."""
        if not isinstance(found, capability):
            raise NotApplicable(f"it is no mm_core.contracts.{capability.__name__}")

    def on_meta(self) -> Any:
        """Builds the predictor of a conformance check on the meta device, as the core does."""
        with torch.device("meta"):
            module = self.build()
        check_object("predictor", module, type(module), self.place)
        return module

    def initialised(self, seed: int = 0, times: int = 1) -> nn.Module:
        """Builds the predictor of a conformance check on the CPU and initialises it as the engine does.

        Args:
            seed: of the initial weights.
            times: how often it is initialised, each time over memory filled with NaN.
        """
        module: nn.Module = self.on_meta()
        fill(module, "predictor", self.place, seed, times)
        return module.eval()

    def trained(self) -> nn.Module:
        """The predictor of a conformance check with slightly changed weights, as if trained.

        Heads that are initialised to zero would hide errors.
        """
        module = self.initialised()
        rng = Randomness(1)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.add_(0.05 * rng.normal(tuple(parameter.shape), name))
        return module

    def inputs(
        self, module: Any, batch: int = 2, patches: tuple[int, int, int] | None = None
    ) -> dict[str, Tensor]:
        """Inputs for the predictor of a conformance check; the last caption is shorter than the others.

        Args:
            module: the predictor.
            batch: number of rows.
            patches: tokens of the clips along (t, h, w), with fewer frames for a predictor that takes fewer;
                None: those of the probe.
        """
        rng = Randomness(2)
        sizes = [p * n for p, n in zip(module.patch_size, self._patches(module, patches), strict=True)]
        length = self.text_length if module.text_padding == "masked" else module.text_padding[1]
        mask = torch.ones(batch, length, dtype=torch.bool)
        mask[-1, max(1, length // 2) :] = False
        text = rng.normal((batch, length, module.text_dim), "text").masked_fill(~mask[..., None], 0)
        latents = rng.normal((batch, module.in_channels, *sizes), "latents")
        timestep = torch.linspace(998.7, 12.5, batch)
        given = self.given(module, latents)
        own = module.with_inputs(latents, timestep, given).conditions if given else {}
        return {
            "latents": latents,
            "timestep": timestep,
            "text": text,
            "text_mask": mask,
            **self._conditions(module, batch, sizes, own),
        }

    def given(self, module: Any, latents: Tensor) -> dict[str, Tensor]:
        """The conditions of the predictor's table of inputs.

        Raises:
            NotApplicable: the shape of one is not known.
        """
        rows: tuple[Input, ...] = module.inputs if isinstance(module, SupportsInputs) else ()
        found: dict[str, Tensor] = {}
        made = _made(rows, latents)
        for row in rows:
            if row.name in made:
                found[row.name] = made[row.name]
            elif row.encoder == "image_encoder":
                found |= _pictured(row, self._features(module, row), len(latents))
            elif row.most or row.encoder or row.make is None:
                found |= _given(row, latents, module.patch_size)
            else:
                shape = self._known(module).get(row.name)
                if shape is None:
                    given = f"{{'{row.name}': (4, 8)}}"
                    raise NotApplicable(
                        f"`make` of the input `{row.name}` takes neither pixels nor numbers on the meta"
                        f" device, and its shape is not declared: condition_shapes = {given}, or"
                        f" conditions={given}"
                    )
                found[row.name] = self._drawn(row.name, shape, len(latents))
        return found

    def _features(self, module: Any, row: Input) -> tuple[int, int]:
        """Number and width of the features of a row that an image encoder encodes."""
        shape: Any = self._known(module).get(row.name)
        declared: list[int | None] = [
            None,
            None,
            *(shape.shape if isinstance(shape, Tensor) else shape or ()),
        ]
        return declared[-2] or _FEATURES * len(row.reads), declared[-1] or self._width

    @cached_property
    def _width(self) -> int:
        """The width of image features: nothing declares that of a table, so it is one that forward takes."""
        module: Any = self.initialised()
        known: int | None = module.image_dim if isinstance(module, SupportsFrames) else None
        widths: dict[int, None] = dict.fromkeys(
            [known or 16, *(p.shape[-1] for p in module.parameters() if p.dim() == 2)]
        )
        for width in widths:
            self.__dict__["_width"] = width  # which `inputs` reads
            try:
                with torch.no_grad():
                    module(**self.inputs(module))
                return width
            except (RuntimeError, ValueError):
                continue
        return next(iter(widths))  # the checks report what forward raises

    def _known(self, module: Any) -> dict[str, Any]:
        """The shapes of conditions that the predictor or the call declares."""
        return {**(Conditions(module).declared or {}), **self.conditions}

    def _drawn(self, name: str, shape: Tensor | Sequence[int | None], batch: int) -> Tensor:
        if isinstance(shape, Tensor):
            return shape.expand(batch, *shape.shape).clone()
        filled = [self.text_length if size is None else size for size in shape]
        return Randomness(2).normal((batch, *filled), name)

    def _patches(self, module: Any, patches: tuple[int, int, int] | None) -> tuple[int, int, int]:
        """The tokens of the test clips, with no more frames than the predictor takes."""
        if patches is None and self.patches is not None:
            return self.patches
        frames, height, width = patches or (2, 3, 2)
        step = module.patch_size[0]
        most = module.max_frames if isinstance(module, SupportsMaxFrames) else frames * step
        return (max(1, min(frames, most // step)), height, width)

    def _conditions(
        self, module: Any, batch: int, sizes: Sequence[int], own: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The conditions that the predictor takes, as far as their shapes are known.

        Args:
            module: the predictor.
            batch: number of rows.
            sizes: of the latents.
            own: those of its table of inputs.

        Raises:
            ContractError: the shape of a needed condition is not known.
        """
        takes = Conditions(module)
        size = (8.0 * sizes[1], 8.0 * sizes[2])
        found = {**takes.of_clips(batch, size, torch.device("cpu"), fps=24.0, guidance=3.5), **own}
        for name, shape in self._known(module).items():
            if isinstance(shape, Tensor) or name not in found:
                found[name] = self._drawn(name, shape, batch)
        if missing := sorted(takes.needed - set(found)):
            raise ContractError(
                f"the predictor's forward needs `{missing[0]}`, whose shape is not known",
                where=self.place,
                accepted="a shape in the predictor's `condition_shapes`, such as {'pooled': (768,)}",
                hint=f"declare it, or call check_predictor with conditions={{'{missing[0]}': (768,)}}",
            )
        return found


def _given(row: Input, latents: Tensor, patch: tuple[int, int, int]) -> dict[str, Tensor]:
    """Conditions of a row of the table: latents as those of the clips, or a number for each sample; of
    several pictures fewer and smaller ones in each sample than in the one before."""
    rng, (rows, channels, _, *sides) = Randomness(2).at("given", row.name), latents.shape
    if not row.most:
        return {row.name: rng.normal(tuple(latents.shape) if row.encoder else (rows,))}
    values = rng.normal((rows, row.most, channels if row.encoder else 3, 1, *sides))
    sizes = torch.zeros(rows, row.most, 3, dtype=torch.int64)
    for sample in range(rows):
        for place in range(max(0, row.most - sample)):
            sizes[sample, place] = torch.tensor([1, *(sides if sample + place == 0 else patch[1:])])
        for place in range(row.most):
            _, height, width = sizes[sample, place].tolist()
            values[sample, place, :, :, height:], values[sample, place, ..., width:] = 0, 0
    return dict(zip(row.conditions, (values, sizes), strict=True))


def _pictured(row: Input, features: tuple[int, int], rows: int) -> dict[str, Tensor]:
    """Features [B,K,D] of a row, or [B,most,K,D] and their numbers: fewer in each sample than in the one
    before."""
    draw = Randomness(2).at("given", row.name).normal
    if not row.most:
        return {row.name: draw((rows, *features))}
    values, sizes = draw((rows, row.most, *features)), torch.zeros(rows, row.most, 1, dtype=torch.int64)
    for sample in range(rows):
        shown = max(0, row.most - sample)
        sizes[sample, :shown], values[sample, shown:] = features[0], 0
    return dict(zip(row.conditions, (values, sizes), strict=True))


def _made(rows: Sequence[Input], latents: Tensor) -> dict[str, Tensor]:
    """What `make` makes of random fields for rows without an encoder. Fields are numbers where that fits, and
    clips of the size at which most of it has that of the latents: the autoencoder's strides are not known."""
    own = [row for row in rows if row.make is not None and row.encoder is None and not row.most]
    numbers = {row.reads[0] for row in rows if row.make is None and row.encoder is None and not row.most}
    kinds = {row.name: [*product(*((n in numbers, True) for n in row.reads))] for row in own}
    most, calls = 0, list[tuple[Input, tuple[bool, ...], ClipSize]]()
    frames, *sides = latents.shape[2:]
    for time, space in _STRIDES:
        size = ((frames - 1) * time + 1, sides[0] * space, sides[1] * space)
        fits = {row.name: [_fit(row, each, latents, size) for each in kinds[row.name]] for row in own}
        if (score := sum(map(max, fits.values()))) > most:
            best = ((row, fits[row.name].index(max(fits[row.name]))) for row in own if any(fits[row.name]))
            most, calls = score, [(row, kinds[row.name][place], size) for row, place in best]
    made = {row.name: _make(row, own, latents, size) for row, own, size in calls}
    return {name: value.float() if value.is_floating_point() else value for name, value in made.items()}


def _make(row: Input, numbers: Sequence[bool], latents: Tensor, size: ClipSize) -> Tensor:
    """What `make` makes of random fields, of which some are `numbers`."""
    assert row.make is not None
    fields: dict[str, Tensor] = {}
    for name, number in zip(row.reads, numbers, strict=True):
        clip = (3, 1 if name in ("first", "last") else size[0], *size[1:])
        shape = (len(latents), *(() if number else clip))
        fields[name] = torch.empty(shape, device="meta")
        if latents.device.type != "meta":
            fields[name] = Randomness(2).normal(shape, "field", name).clamp(-1, 1)
    return row.make(fields, size)


def _fit(row: Input, numbers: Sequence[bool], latents: Tensor, size: ClipSize) -> int:
    """How likely fields are right: 3 for a condition in the size of the latents, 2 for another of clips, 1
    for more dimensions, 0 for none. Found without memory: what is made of wrong fields may be large."""
    try:
        made = _make(row, numbers, latents.to("meta"), size)
    except Exception:  # the author's code, for fields of another kind or size
        return 0
    if len(made) != len(latents):
        return 0
    return 3 if made.shape[2:] == latents.shape[2:] else 1 + (made.dim() <= latents.dim())
