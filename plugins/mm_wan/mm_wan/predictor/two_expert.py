"""Predictor `wan/two_expert`: Wan 2.2 A14B, whose steps at much noise are another transformer's than those
at little (https://github.com/Wan-Video/Wan2.2, "MoE architecture").

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

from mm_core.contracts import Expert, FrameNames, GivenFrames, ModuleFlops, PredictorInputs, WeightsFrom
from mm_core.errors import CheckpointError, ConfigError, ContractError
from mm_wan.predictor.architecture import expert_folders, resolve, stored_boundary
from mm_wan.predictor.expert_files import ExpertFiles, open_expert
from mm_wan.predictor.transformer import TEXT_LENGTH, WanTransformer
from mm_wan.presets import I2V_BOUNDARY, PRESETS, T2V_BOUNDARY

TIMESTEPS = 1000
"""That Wan's models count up to pure noise: the boundary is a share of them."""


class TwoExpert(nn.Module):
    """Two `WanTransformer`s of one architecture, `high` and `low`. Satisfies `mm_core.contracts.Predictor`,
    `SupportsExperts`, `SupportsWeightsFrom`, `SupportsFrames` and `SupportsModuleFlops`.

    `high` is responsible for timesteps from 1000 * boundary on, `low` for those below it. With `train: high`
    the other is not built: while clips are sampled (`complete`), it is read from `from_pretrained`.
    Fields are those of `TwoExpertConfig`, where each is described.

    Raises:
        CheckpointError: a folder that does not hold two transformers of one architecture, or others than the
            preset's.
        ConfigError: fields that contradict the folder or the preset.
    """

    text_padding = ("fixed", TEXT_LENGTH)
    _no_split_modules = WanTransformer._no_split_modules

    def __init__(
        self,
        from_pretrained: str | None = None,
        preset: str | None = None,
        boundary: float | None = None,
        train: str = "both",
        **fields: Any,
    ) -> None:
        super().__init__()
        pairs = [name for name, known in PRESETS.items() if known.boundary is not None]
        if preset is not None and preset not in pairs:
            raise ConfigError(
                f"preset {preset!r} is no model of two experts",
                accepted=", ".join(pairs),
                hint="wan/transformer trains it" if preset in PRESETS else None,
            )
        self._top = None if from_pretrained is None else Path(from_pretrained)
        self._folders = {} if self._top is None else expert_folders(self._top)
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
        """Velocity[B,C,T,H,W] in the dtype of the latents: see `WanTransformer.forward`.

        expert: `high` or `low`, for all rows; None: each row by its timestep, for which the device is waited.

        Raises:
            ContractError: an expert that is neither trained nor there to sample; what WanTransformer says.
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
        """An expert; one that is not trained is read when it is first asked for."""
        if name not in self._visiting:
            if name not in self.built:
                raise ContractError(
                    f"the expert {name!r} is not trained by this run, and not read",
                    where="wan/two_expert",
                    accepted="the trained expert's timesteps; or any within `complete`",
                )
            return self.built[name]
        visitor = self._visiting[name]
        if isinstance(visitor, ExpertFiles):
            visitor = self._visiting[name] = visitor.read(latents.dtype, latents.device)
        return visitor

    @contextmanager
    def complete(self, device: torch.device) -> Iterator[None]:
        """For the length of the block, both experts are there. One that is not trained is read from the
        folder that the run began from when it is first needed: whole, on every rank, in the dtype of the
        latents, frozen. CheckpointError, at once, where it is not there or of another architecture."""
        self._visiting = {e.name: self._files(e.name) for e in self.experts if not e.trained}
        try:
            yield
        finally:
            self._visiting = {}

    @property
    def built(self) -> dict[str, WanTransformer]:
        """The experts that are trained, by their names."""
        return {name: model for name, model in self.named_children() if isinstance(model, WanTransformer)}

    # -- what the core asks ------------------------------------------------------------------------

    @property
    def needed_conditions(self) -> dict[str, str]:
        """Conditions that both experts take, each with its shape."""
        return self._any().needed_conditions

    def frames_clip(self, frames: Sequence[Tensor], num_frames: int) -> Tensor:
        """See `WanTransformer.frames_clip`."""
        return self._any().frames_clip(frames, num_frames)

    def with_frames(self, latents: Tensor, timestep: Tensor, given: GivenFrames) -> PredictorInputs:
        """See `WanTransformer.with_frames`."""
        return self._any().with_frames(latents, timestep, given)

    def module_flops(
        self,
        latents: Sequence[int],
        timestep: Sequence[int],
        text: Sequence[int],
        expert: str | None = None,
        **conditions: Sequence[int],
    ) -> Sequence[ModuleFlops]:
        """What a forward by one expert multiplies (None: by any of them, for they are alike)."""
        name = expert or next(e.name for e in self.experts if e.trained)
        found = self._any().module_flops(latents, timestep, text, **conditions)
        return [product.below(name) for product in found]

    def forward_flops(
        self,
        latents: Sequence[int],
        text_length: int = TEXT_LENGTH,
        image_tokens: int = 0,
        timesteps_per_token: bool = False,
    ) -> int:
        """Operations of a forward by one expert: see `mm_wan.predictor.flops`."""
        return self._any().forward_flops(latents, text_length, image_tokens, timesteps_per_token)

    def init_weights(self) -> None:
        """Fills every parameter and buffer of what is trained: see `WanTransformer.init_weights`."""
        for model in self.built.values():
            model.init_weights()

    # -- which two ---------------------------------------------------------------------------------

    def _any(self) -> WanTransformer:
        """A trained expert, to ask for what both have."""
        return next(iter(self.built.values()))

    def _place(self, name: str) -> str | None:
        return None if self._top is None else str(self._top / self._folders[name])

    def _check_pair(self, preset: str | None, fields: Mapping[str, object]) -> None:
        """CheckpointError where the architectures of the folder's two differ."""
        both = (resolve(self._place(name), preset, fields)[0] for name in ("high", "low"))
        high, low = (architecture.fields for architecture in both)
        if high != low:
            apart = ", ".join(f"{key} {high[key]} and {low[key]}" for key in high if high[key] != low[key])
            raise CheckpointError(
                f"the two experts are no pair: {apart}", where=str(self._top), accepted="one architecture"
            )

    def _boundary(self, given: float | None, preset: str | None, model: WanTransformer) -> float:
        """As set, stored, of the preset, or as published for such a model. ConfigError where two differ."""
        stored = None if self._top is None else stored_boundary(self._top)
        origin, known = str(self._top), stored
        if known is None and preset is not None:
            origin, known = f"preset {preset}", PRESETS[preset].boundary
        if given is not None and known is not None and given != known:
            raise ConfigError(
                f"boundary {given:g} contradicts {origin}, whose experts meet at {known:g}",
                hint="leave boundary out: the published one counts",
            )
        return given or known or (I2V_BOUNDARY if model.image_channels else T2V_BOUNDARY)

    def _files(self, name: str) -> ExpertFiles:
        """Those of an expert that is not trained."""
        if self._top is None:
            raise CheckpointError(
                f"clips need the expert {name!r}, which this run does not train and has no files of",
                where="task.predictor.from_pretrained",
                accepted="the folder of both experts",
            )
        return open_expert(self._top / self._folders[name])
