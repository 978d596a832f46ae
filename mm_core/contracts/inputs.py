"""What reaches a predictor beside latents, timestep and text: conditions, and the table of its inputs.

Letters as in `mm_core.contracts.components`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from mm_core.contracts.frames import PredictorInputs

ConditionShapes = Mapping[str, tuple[int | None, ...]]
"""Name of a condition -> shape of one sample's tensor, without the batch; None for a size that varies."""

CLIP_CONDITIONS: ConditionShapes = MappingProxyType({"fps": (), "size": (2,), "guidance": ()})
"""Conditions that the task `text_to_video` gives to every predictor whose forward names them, in float32.

`fps` [B] are the frames per second of each clip, `size` [B,2] its height and width in pixels, and `guidance`
[B] the scale of embedded guidance: a predictor that takes it is sampled without an unconditional pass. Their
precision is never lowered.
"""


@runtime_checkable
class SupportsConditionShapes(Protocol):
    """Capability of a text encoder that returns conditions, or of a predictor that declares those it takes.

    Of a text encoder: what `encode` returns beside hidden states and mask. Of a predictor: without it, the
    predictor takes the parameters of its forward; with it, exactly the conditions declared here, and those of
    its own `with_frames`.

    Attributes:
        condition_shapes: name of each condition -> shape of one sample's tensor, without the batch; None for
            a size that varies. Example: `{"pooled": (768,), "glyphs": (None, 1472)}`.
    """

    condition_shapes: ConditionShapes


ClipSize = tuple[int, int, int]
"""Frames, height and width (F,Y,X) of a clip."""

Making = Callable[[Mapping[str, Tensor], ClipSize], Tensor]
"""Makes what an encoder gets, or a condition, of the fields of a row and the size of the clips."""


@dataclass(frozen=True)
class Input:
    """A row of the table of a predictor's inputs: fields of a sample become one condition.

    Fields are the columns that the dataset names, and parts of the clip itself: `video` [B,3,F,Y,X], and
    `first` and `last`, its first and last frame [B,3,1,Y,X]. Pixels are float32 in [-1, 1].

    Attributes:
        name: of the condition, in `with_inputs`.
        fields: their names; (): the one field with the name of the condition.
        make: pure function of the fields and the clips' size that makes the pixels [B,3,F',Y',X'] to encode
            or, without an encoder, the condition [B,...]; None: the one field as it is. The image encoder
            gets fields as they are.
        encoder: what encodes it: the autoencoder to latents [B,C,T',H',W'] (the mode), the image encoder to
            features [B,K,D] of every field; None: nothing.
        dropout: share of the training samples that get zeros in its place.
        unconditional: what the unconditional pass of guidance gets: the same, or zeros.
        most: above 0, the one field is a list of up to so many pictures of their own size. Each is made and
            encoded by itself. The condition is [B,most,...], with zeros behind those that are smaller or
            missing, and a condition `NAME_sizes` [B,most,n] int64 has their sizes: (T',H',W') of latents or
            pixels, (K,) of features; 0 for those that are missing or dropped. Encoders are called `most`
            times a sample, so that every rank calls them equally often.

    Raises:
        ValueError: an argument has a value that is not accepted.
    """

    name: str
    fields: tuple[str, ...] = ()
    make: Making | None = None
    encoder: Literal["autoencoder", "image_encoder"] | None = None
    dropout: float = 0.0
    unconditional: Literal["same", "zeros"] = "same"
    most: int = 0

    def __post_init__(self) -> None:
        own, makes = ("latents", "timestep", "text", "text_mask"), self.encoder != "image_encoder"
        accepted = {
            "name": (self.name not in own, f"none of {', '.join(own)}"),
            "fields": (not isinstance(self.fields, str), 'a tuple, such as ("edge",)'),
            "make": (self.make is None or makes, "None where the image encoder encodes the fields"),
            "encoder": (self.encoder in (None, "autoencoder", "image_encoder"), "autoencoder, image_encoder"),
            "dropout": (0 <= self.dropout <= 1, "0 to 1"),
            "unconditional": (self.unconditional in ("same", "zeros"), "same, zeros"),
            "most": (self.most >= 0, "0 or more"),
        }
        for key, (right, values) in accepted.items():
            if not right:
                found = getattr(self, key)
                raise ValueError(f"{key} of the input {self.name} is {found!r}; accepted: {values}")
        if self.most and len(self.fields) > 1:
            raise ValueError(f"the input {self.name} has several pictures, so it reads one field")

    @property
    def conditions(self) -> tuple[str, ...]:
        """Names of the conditions that it becomes."""
        return (self.name, f"{self.name}_sizes") if self.most else (self.name,)

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the fields that it reads."""
        return self.fields or (self.name,)


@runtime_checkable
class SupportsReads(Protocol):
    """Capability of a text encoder whose states depend on fields of a sample beside its caption.

    Its tokenizer is called as `tokenizer(captions, fields)`, in data workers. `fields` has for each name
    one list for each caption, of the pictures uint8 [3,Y,X] of any size (of a clip its first frame), or of a
    number. An empty caption, which stands for dropped captions, comes with the fields of its sample.

    Attributes:
        reads: names of the fields (see `Input`).
    """

    reads: tuple[str, ...]


@runtime_checkable
class SupportsInputs(Protocol):
    """Capability of a predictor that takes more than noisy latents, a timestep and a caption.

    Attributes:
        inputs: the rows of its table. Without a row here, what a dataset gives beside clips and captions does
            not reach the predictor.
    """

    inputs: tuple[Input, ...]

    def with_inputs(self, latents: Tensor, timestep: Tensor, given: Mapping[str, Tensor]) -> PredictorInputs:
        """The inputs of the predictor's forward; pure, and called outside the forward.

        Sampling calls it in each step, and once more after the last one, so that known latents stay exactly
        as given.

        Args:
            latents: [B,C,T,H,W].
            timestep: [B] in model units.
            given: the conditions of the table by name, [B,...] in float32; sizes are on the host.
        """


@runtime_checkable
class SupportsGuided(Protocol):
    """Capability of a predictor with a formula of its own for classifier-free guidance.

    Without it, the formula is unconditional + scale * (conditional - unconditional), off up to the scale 1.

    Attributes:
        guidance_off: the scale at which `guided` returns the conditional prediction. Up to it, sampling makes
            no unconditional pass.
    """

    guidance_off: float

    def guided(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        """The prediction [B,C,T,H,W] from those of both passes.

        Pure: it reads no parameter, is called outside the forward, and computes each row from that row alone.

        Args:
            conditional: [B,C,T,H,W] float32, predicted with the prompt.
            unconditional: as `conditional`, predicted with the negative or the empty prompt.
            scale: of guidance, above `guidance_off`; that of the step's expert.
        """
