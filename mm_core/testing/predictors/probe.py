"""The small predictor of the conformance checks, and inputs that match it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from mm_core.contracts import Input, Randomness, SupportsFrames, SupportsInputs, SupportsMaxFrames
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
                        f"`make` of the input `{row.name}` takes neither random pixels nor numbers, and its"
                        f" shape is not declared: condition_shapes = {given}, or conditions={given}"
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
    """What `make` makes of random fields for rows without an encoder. The clip has the size at which most of
    it has that of the latents: the strides of the autoencoder are not known."""
    own = [row for row in rows if row.make is not None and row.encoder is None and not row.most]
    numbers = {row.reads[0] for row in rows if row.make is None and row.encoder is None and not row.most}
    best: dict[str, Tensor] = {}
    most = -1
    frames, *sides = latents.shape[2:]
    for time, space in _STRIDES if own else ():
        size = ((frames - 1) * time + 1, sides[0] * space, sides[1] * space)
        found = {row.name: _make(row, numbers, latents, size) for row in own}
        made = {name: value for name, value in found.items() if value is not None}
        if (score := sum(_fit(value, latents) for value in made.values())) > most:
            best, most = made, score
    return best


def _make(row: Input, numbers: set[str], latents: Tensor, size: tuple[int, int, int]) -> Tensor | None:
    """What `make` makes of pixels, or of numbers where they fit better; None if it takes neither."""
    assert row.make is not None
    found: list[Tensor] = []
    for kinds in product((False, True), repeat=len(row.reads)):
        fields: dict[str, Tensor] = {}
        for name, number in zip(row.reads, kinds, strict=True):
            clip = (3, 1 if name in ("first", "last") else size[0], *size[1:])
            shape = (len(latents), *(() if number or name in numbers else clip))
            fields[name] = Randomness(2).normal(shape, "field", name).clamp(-1, 1)
        try:
            made = row.make(fields, size)
        except Exception:  # the author's code, for fields of another kind or size
            continue
        found += [made.float() if made.is_floating_point() else made]
    return max(found, key=lambda one: _fit(one, latents), default=None)


def _fit(made: Tensor, latents: Tensor) -> int:
    """2 for a condition in the size of the latents, 1 for another one of clips, 0 for more dimensions."""
    return 2 if made.shape[2:] == latents.shape[2:] else int(made.dim() <= latents.dim())
