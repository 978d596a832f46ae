"""Predictor `wan/two_expert`: Wan 2.2 A14B, with one transformer for high noise and one for low noise
(https://github.com/Wan-Video/Wan2.2, "MoE architecture").

Letters: B batch; C,T,H,W latents; L,D text; N tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mm_core.contracts import (
    ContextPlan,
    Expert,
    FrameNames,
    GivenFrames,
    ModuleFlops,
    PredictorInputs,
    WeightsFrom,
)
from mm_core.errors import CheckpointError, ConfigError, ContractError
from mm_wan.predictor.architecture import expert_files, expert_folders, resolve, stored_boundary
from mm_wan.predictor.config import ExpertPaths
from mm_wan.predictor.expert_files import ExpertFiles, open_expert
from mm_wan.predictor.transformer import TEXT_LENGTH, WanTransformer
from mm_wan.presets import I2V_BOUNDARY, PRESETS, T2V_BOUNDARY

TIMESTEPS = 1000
"""Timestep of pure noise in Wan's models. The boundary is a share of it."""


class TwoExpert(nn.Module):
    """Wan 2.2's pair of experts: two `WanTransformer`s of one architecture, `high` and `low`. Satisfies
    `mm_core.contracts.Predictor`, `SupportsExperts`, `SupportsWeightsFrom`, `SupportsFrames` and
    `SupportsModuleFlops`.

    `high` handles timesteps from 1000 * boundary upwards, `low` those below. With `train: high`, `low` is not
    built; while clips are sampled (`complete`), it is read from `from_pretrained`. `TwoExpertConfig`
    describes the fields.

    Raises:
        CheckpointError: the folder does not hold two transformers of one architecture, or they differ from
            the preset.
        ConfigError: fields contradict the folder or the preset.
    """

    text_padding = ("fixed", TEXT_LENGTH)
    _no_split_modules = WanTransformer._no_split_modules

    def __init__(
        self,
        from_pretrained: str | ExpertPaths | None = None,
        preset: str | None = None,
        boundary: float | None = None,
        train: str = "both",
        **fields: Any,
    ) -> None:
        super().__init__()
        pairs = [name for name, known in PRESETS.items() if known.boundary is not None]
        if preset is not None and preset not in pairs:
            raise ConfigError(
                f"preset {preset!r} is not a model with two experts",
                accepted=", ".join(pairs),
                hint="to train it, set type: wan/transformer" if preset in PRESETS else None,
            )
        self._top: Path | None = None
        self.folders: dict[str, str] = {}
        """The folders or files of both experts below that of `weights_from`."""
        self.in_files = isinstance(from_pretrained, ExpertPaths)
        if isinstance(from_pretrained, ExpertPaths):
            self._top, self.folders = expert_files(from_pretrained)
        elif from_pretrained is not None:
            self._top = Path(from_pretrained)
            self.folders = expert_folders(self._top)
        self._check_pair(preset, fields)
        self.weights_from: WeightsFrom | None = None
        for name in ("high", "low"):
            if train in ("both", name):
                self.add_module(name, WanTransformer(self._place(name), preset, **fields))
        first = self._any()
        if self._top is not None and first.weights_from is not None:
            self.weights_from = replace(first.weights_from, path=str(self._top))
        self.patch_size: tuple[int, int, int] = first.patch_size
        self.in_channels: int = first.in_channels
        self.out_channels: int = first.out_channels
        self.text_dim: int = first.text_dim
        self.image_dim: int | None = first.image_dim
        self.frame_choices: tuple[FrameNames, ...] = first.frame_choices
        self.boundary = self._boundary(boundary, preset, first)
        begins = self.boundary * TIMESTEPS
        self.experts = (
            Expert("high", begins, None, train in ("both", "high")),
            Expert("low", 0.0, begins, train in ("both", "low")),
        )
        self._visiting: dict[str, ExpertFiles | WanTransformer] = {}

    # -- forward -----------------------------------------------------------------------------------

    def forward(
        self,
        latents: Tensor,
        timestep: Tensor,
        text: Tensor,
        text_mask: Tensor,
        expert: str | None = None,
        **conditions: Tensor,
    ) -> Tensor:
        """Predicts the velocity [B,C,T,H,W] of noisy latents with Wan 2.2's experts, in the latents' dtype.

        Args:
            latents: as for `WanTransformer.forward`; so are timestep, text, text_mask and conditions.
            expert: `high` or `low` for all rows; None: chosen per row by its timestep, which synchronises
                with the device.

        Raises:
            ContractError: the expert is neither trained nor loaded for sampling; or as in
                `WanTransformer.forward`.
        """
        if expert is not None:
            model = self._model(expert, latents)
            found: Tensor = model(latents, timestep, text, text_mask, **conditions)
            return found
        highest = timestep if timestep.dim() == 1 else timestep.amax(1)
        high = (highest >= self.boundary * TIMESTEPS).tolist()
        rows = {"high": [i for i, is_high in enumerate(high) if is_high]}
        rows["low"] = [i for i, is_high in enumerate(high) if not is_high]
        given = {"latents": latents, "timestep": timestep, "text": text, "text_mask": text_mask, **conditions}
        parts = []
        for name, chosen in rows.items():
            if chosen:
                model = self._model(name, latents)
                parts.append(model(**{key: tensor[chosen] for key, tensor in given.items()}))
        order = [*rows["high"], *rows["low"]]
        back = sorted(range(len(order)), key=order.__getitem__)
        return torch.cat(parts)[back]

    def _model(self, name: str, latents: Tensor) -> WanTransformer:
        """The expert of this name. An untrained one is read on first use."""
        if name not in self._visiting:
            if name not in self.built:
                raise ContractError(
                    f"the expert {name!r} is not trained by this run, and its weights are not loaded",
                    where="wan/two_expert",
                    accepted="timesteps of the trained expert",
                    hint="set task.predictor.train: both, or call it inside its context `complete()`",
                )
            return self.built[name]
        visitor = self._visiting[name]
        if isinstance(visitor, ExpertFiles):
            visitor = self._visiting[name] = visitor.read(latents.dtype, latents.device)
        return visitor

    @contextmanager
    def complete(self, device: torch.device) -> Iterator[None]:
        """Context in which both of Wan 2.2's experts are available, for sampling clips. The untrained one
        is read on first use from the folder that the run started from: unsharded, on every rank, frozen,
        in the latents' dtype.

        Raises:
            CheckpointError: on entry, if the untrained expert is missing or has another architecture.
        """
        self._visiting = {e.name: self._files(e.name) for e in self.experts if not e.trained}
        try:
            yield
        finally:
            self._visiting = {}

    @property
    def built(self) -> dict[str, WanTransformer]:
        """The trained experts of Wan 2.2, by name."""
        return {name: model for name, model in self.named_children() if isinstance(model, WanTransformer)}

    # -- the core's contracts ----------------------------------------------------------------------

    @property
    def needed_conditions(self) -> dict[str, str]:
        """Conditions that both of Wan's experts need, each with its shape."""
        return self._any().needed_conditions

    def frames_clip(self, frames: Sequence[Tensor], num_frames: int) -> Tensor:
        """Builds the clip that Wan's autoencoder encodes for given frames: see
        `WanTransformer.frames_clip`."""
        return self._any().frames_clip(frames, num_frames)

    def with_frames(self, latents: Tensor, timestep: Tensor, given: GivenFrames) -> PredictorInputs:
        """Inputs of Wan's experts for noisy latents and given frames: see `WanTransformer.with_frames`."""
        return self._any().with_frames(latents, timestep, given)

    def context_plan(self) -> ContextPlan:
        """Where Wan's trained experts have their tokens: see `WanTransformer.context_plan`."""
        plan = self._any().context_plan()
        return ContextPlan(
            heads=plan.heads,
            attention=tuple(f"{name}.{path}" for name in self.built for path in plan.attention),
            split={f"{name}.{path}": dims for name in self.built for path, dims in plan.split.items()},
            gather={f"{name}.{path}": dim for name in self.built for path, dim in plan.gather.items()},
        )

    def module_flops(
        self,
        latents: Sequence[int],
        timestep: Sequence[int],
        text: Sequence[int],
        expert: str | None = None,
        **conditions: Sequence[int],
    ) -> Sequence[ModuleFlops]:
        """FLOPs of each module in a forward of one Wan expert. Both experts have equal FLOPs, so `expert`
        may be None."""
        name = expert or next(e.name for e in self.experts if e.trained)
        found = self._any().module_flops(latents, timestep, text, **conditions)
        return [product.below(name) for product in found]

    def init_weights(self) -> None:
        """Initialises all parameters and buffers of the trained Wan experts: see
        `WanTransformer.init_weights`."""
        for model in self.built.values():
            model.init_weights()

    # -- the pair ----------------------------------------------------------------------------------

    def _any(self) -> WanTransformer:
        """A trained expert, for facts that both share."""
        return next(iter(self.built.values()))

    def _place(self, name: str) -> str | None:
        return None if self._top is None else str(self._top / self.folders[name])

    def _check_pair(self, preset: str | None, fields: Mapping[str, object]) -> None:
        """Raises CheckpointError if the two experts in the folder differ in architecture."""
        both = (resolve(self._place(name), preset, fields)[0] for name in ("high", "low"))
        high, low = (architecture.fields for architecture in both)
        if high != low:
            apart = ", ".join(f"{key} {high[key]} and {low[key]}" for key in high if high[key] != low[key])
            raise CheckpointError(
                f"the two experts have different architectures: {apart}",
                where=str(self._top),
                accepted="two transformers of one architecture",
            )

    def _boundary(self, given: float | None, preset: str | None, model: WanTransformer) -> float:
        """The boundary: as set, from the folder, from the preset, or as published for such a model. Raises
        ConfigError if the set value contradicts the folder or preset."""
        stored = None if self._top is None else stored_boundary(self._top)
        origin, known = str(self._top), stored
        if known is None and preset is not None:
            origin, known = f"preset {preset}", PRESETS[preset].boundary
        if given is not None and known is not None and given != known:
            raise ConfigError(
                f"boundary {given:g} contradicts {origin}, which has {known:g}",
                hint="leave boundary out: the published value applies",
            )
        return given or known or (I2V_BOUNDARY if model.image_channels else T2V_BOUNDARY)

    def _files(self, name: str) -> ExpertFiles:
        """Files of an untrained expert."""
        if self._top is None:
            raise CheckpointError(
                f"clips need the expert {name!r}, which is not trained, and from_pretrained is not set",
                where="task.predictor.from_pretrained",
                accepted="the folder with both experts, or a file of each",
            )
        heads = self._any().architecture.num_attention_heads if self.in_files else None
        return open_expert(self._top / self.folders[name], heads)
