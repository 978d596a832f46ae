"""What a predictor is given beside noisy latents and captions, by its table of inputs (`SupportsInputs`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mm_core.contracts import (
    Autoencoder,
    CachePart,
    ClipSize,
    Features,
    FrameNames,
    ImageEncoder,
    Input,
    Predictor,
    PredictorInputs,
    Ragged,
    Randomness,
    SampleKey,
    SupportsInputs,
)
from mm_core.device import copied_to
from mm_core.errors import ContractError, did_you_mean, plural
from mm_core.plugin.checks.places import place_of_object
from mm_core.tasks.text_to_video.conditions import Conditions
from mm_core.tasks.text_to_video.frames import FRAMES, IMAGES, FramesOf, frame_rows, image_dim
from mm_core.tasks.text_to_video.making import digest, makings
from mm_core.tasks.text_to_video.returned_shapes import expect_features, expect_inputs, expect_latents

OF_CLIP = ("video", "first", "last")
"""Fields that are the clip itself, or a part of it."""

_NONE: Mapping[str, Tensor] = MappingProxyType({})


def fields_of(pixels: Tensor | None, others: Mapping[str, Any] = _NONE) -> dict[str, Any]:
    """The fields of a batch: the parts of its clips [B,3,F,Y,X], and what the dataset gives beside them."""
    if pixels is None:
        return dict(others)
    return {"video": pixels, "first": pixels[:, :, :1], "last": pixels[:, :, -1:], **others}


@dataclass(frozen=True)
class GivenInputs:
    """The table of a predictor's inputs, and the frozen components that encode its rows.

    Attributes:
        predictor: the task's.
        conditions: of its forward.
        autoencoder: encodes pixels to latents.
        image_encoder: encodes features; None for a predictor that takes none.
        frames: the frames of the clip that a predictor with `with_frames` is given.
        reads: the fields on which the text encoder's states depend (`SupportsReads`).
    """

    predictor: Predictor
    conditions: Conditions
    autoencoder: Autoencoder
    image_encoder: ImageEncoder | None
    frames: FrameNames
    reads: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[Input, ...]:
        """The rows of the table."""
        return (*frame_rows(self.predictor, self.frames), *self._own)

    @property
    def _own(self) -> tuple[Input, ...]:
        return self.predictor.inputs if isinstance(self.predictor, SupportsInputs) else ()

    @property
    def names(self) -> list[str]:
        """The fields that a dataset or a request gives beside the clip and its parts."""
        return [name for name in self._read if name not in OF_CLIP]

    @property
    def _read(self) -> dict[str, None]:
        """The fields that the rows and the text encoder read."""
        return dict.fromkeys([*(name for row in self.rows for name in row.reads), *self.reads])

    @property
    def asked(self) -> dict[str, int | None]:
        """The fields that a request to sample gives by name, with the most pictures of each (0: it is one
        value; None: not known); frames of image-to-video are its images."""
        own: dict[str, int | None] = {name: row.most for row in self._own for name in row.reads}
        beside = [name for name in self.reads if name not in own and name not in self.frames]
        return own | {name: 0 if name in OF_CLIP else None for name in beside}

    @property
    def reads_clip(self) -> bool:
        """Whether a condition is made of the clip itself."""
        return any(name in OF_CLIP for name in self._read)

    @property
    def uses_image_encoder(self) -> bool:
        """Whether a condition comes from the image encoder."""
        return any(row.encoder == "image_encoder" for row in self.rows)

    def encoded(self, fields: Mapping[str, Any], size: ClipSize, device: torch.device) -> dict[str, Tensor]:
        """The conditions of the table, [B,...] in float32.

        Args:
            fields: of the rows: pixels [B,3,F,Y,X] in [-1, 1], several pictures, and numbers [B,...].
            size: of the clips.
            device: of the conditions.

        Raises:
            ContractError: a field is missing.
        """
        found: dict[str, Tensor] = {}
        for row in self.rows:
            found |= self.encode(row, fields, size, device)
        return found

    def encode(
        self, row: Input, fields: Mapping[str, Any], size: ClipSize, device: torch.device
    ) -> dict[str, Tensor]:
        """The conditions of one row; see `encoded`."""
        given = {name: self._field(row, name, fields) for name in row.reads}
        if row.most:
            return self.joined(row, self.each(row, given[row.reads[0]], size, device), device)
        return {row.name: self._one(row, given, size)}

    def _one(self, row: Input, given: Mapping[str, Any], size: ClipSize) -> Tensor:
        if row.encoder == "image_encoder":
            assert self.image_encoder is not None
            columns = [[*map(picture_of, values)] for values in given.values()]
            encoder = self.image_encoder
            found = (expect_features(encoder.encode(own), len(own), encoder) for own in columns)
            return torch.cat([*found], dim=1)
        made: Tensor = given[row.reads[0]] if row.make is None else row.make(given, size)
        if row.encoder is None:
            return made.float() if made.is_floating_point() else made
        shape = (len(made), *self.autoencoder.latent_shape(*made.shape[2:]))
        return expect_latents(self.autoencoder.encode(made), shape, self.autoencoder)

    def each(self, row: Input, pictures: Ragged, size: ClipSize, device: torch.device) -> list[list[Tensor]]:
        """What becomes of each picture of the samples. Blank pictures are encoded in the place of those that
        are missing: every rank calls a sharded encoder equally often."""
        (name,), blank, found = row.reads, replace(row, make=None), []
        for own in pictures.rows:
            if len(own) > row.most:
                raise ContractError(
                    f"a sample has {plural(len(own), 'picture')} in the field `{name}`",
                    where=f"task.predictor, {place_of_object(self.predictor)}",
                    accepted=f"at most {row.most}",
                )
            found.append([self._one(row, {name: one[None]}, size)[0] for one in own])
            for _ in range(row.most - len(own)):
                self._one(blank, {name: torch.zeros(1, 3, *self._blank, device=device)}, size)
        return found

    @property
    def _blank(self) -> ClipSize:
        """The size of a blank picture: one patch of latents."""
        _, height, width = (
            a * b for a, b in zip(self.autoencoder.stride, self.predictor.patch_size, strict=True)
        )
        return 1, height, width

    def joined(self, row: Input, made: Sequence[Sequence[Tensor]], device: torch.device) -> dict[str, Tensor]:
        """The two conditions of a row with several pictures, of what has become of each sample's."""
        shape = self._least(row)
        for own in made:
            for one in own:
                shape = tuple(map(max, shape, one.shape))
        values = torch.zeros(len(made), row.most, *shape, device=device)
        where = slice(None, -1) if row.encoder == "image_encoder" else slice(1, None)  # but the channels
        sizes = torch.zeros(len(made), row.most, len(shape) - 1, dtype=torch.int64)
        for place, own in enumerate(made):
            for number, one in enumerate(own):
                values[place, number][tuple(map(slice, one.shape))] = one
                sizes[place, number] = torch.tensor(one.shape[where])
        return dict(zip(row.conditions, (values, sizes), strict=True))  # the host may read sizes

    def _least(self, row: Input) -> tuple[int, ...]:
        """The shape of what becomes of a blank picture."""
        if row.encoder == "image_encoder":
            assert self.image_encoder is not None
            return self.image_encoder.tokens or 1, self.image_encoder.hidden_size
        return self.autoencoder.latent_shape(*self._blank) if row.encoder else (3, *self._blank)

    def on_meta(self, size: ClipSize) -> dict[str, Tensor] | None:
        """Conditions of one clip without values; None where the image encoder's tokens are unknown."""
        clip = fields_of(torch.empty(1, 3, *size, device="meta"))
        found: dict[str, Tensor] = {}
        for row in self.rows:
            if row.encoder == "image_encoder":
                encoder = self.image_encoder
                if encoder is None or encoder.tokens is None:
                    return None
                width = image_dim(self.predictor) or encoder.hidden_size
                shape: tuple[int, ...] = (encoder.tokens * len(row.reads), width)
            elif row.most:  # as large as the clip
                shape = self.autoencoder.latent_shape(1, *size[1:]) if row.encoder else (3, 1, *size[1:])
            elif row.encoder is None and row.make is None:
                shape = ()  # a number
            else:
                given = {name: clip.get(name, clip["video"]) for name in row.reads}
                made = (
                    given[row.reads[0]]
                    if row.make is None
                    else next(makings(row, given, _beside_clip(row), size))
                )
                shape = self.autoencoder.latent_shape(*made.shape[2:]) if row.encoder else made.shape[1:]
            if row.most:
                ends = torch.empty(1, row.most, len(shape) - 1, dtype=torch.int64, device="meta")
                values = torch.empty(1, row.most, *shape, device="meta")
                found |= dict(zip(row.conditions, (values, ends), strict=True))
            else:
                found[row.name] = torch.empty(1, *shape, device="meta")
        return found

    def dropped(
        self, given: Mapping[str, Tensor], rng: Randomness, keys: Sequence[SampleKey]
    ) -> dict[str, Tensor]:
        """The conditions of training samples, with zeros in the rows that are dropped."""
        found = dict(given)
        for row in self.rows:
            if row.dropout > 0:
                out = [rng.uniform("input dropout", row.name, *key) < row.dropout for key in keys]
                found |= {name: _zeroed(given[name], out) for name in row.conditions}
        return found

    def inputs(
        self,
        latents: Tensor,
        timestep: Tensor,
        given: Mapping[str, Tensor],
        conditions: Mapping[str, Tensor] = _NONE,
    ) -> PredictorInputs:
        """The predictor's arguments without the text.

        Args:
            latents: [B,C,T,H,W].
            timestep: [B], in model units.
            given: conditions of the table, by name.
            conditions: further tensors by name; those that the predictor makes of `given` have priority.
        """
        if not given:
            return PredictorInputs(latents, timestep, conditions)
        shown: object = self.predictor if self._own else FramesOf(self.predictor, self.frames)
        assert isinstance(shown, SupportsInputs)
        found = shown.with_inputs(latents, timestep, given)
        expect_inputs(found, latents, self.conditions, self.predictor, "inputs" if self._own else "frames")
        return replace(found, conditions={**conditions, **found.conditions})

    def unconditional(self, given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What the unconditional pass of guidance is given: `given` itself where that is the same."""
        zeros = {name for row in self.rows if row.unconditional == "zeros" for name in row.conditions}
        if not zeros:
            return given
        return {name: torch.zeros_like(t) if name in zeros else t for name, t in given.items()}

    def cache_parts(self) -> Iterator[CachePart]:
        """A part of the feature cache for each row."""
        for row in self.rows:
            frames = row.name in (FRAMES, IMAGES)
            settings: dict[str, Any] = {"frames" if frames else "fields": list(row.reads)}
            if row.make is not None:
                settings["clip"] = digest(row, _beside_clip(row))
            if row.most:
                settings["most"] = row.most
            components = () if row.encoder is None else (row.encoder,)
            yield CachePart(_part_of(row), components, "media", settings, fields=_beside_clip(row))

    def stored(
        self, row: Input, fields: Mapping[str, Any], size: ClipSize, device: torch.device
    ) -> list[Features]:
        """What a cache stores of each sample for a row: of several pictures their values without padding."""
        if not row.most:
            return [{"values": one} for one in self.encode(row, fields, size, device)[row.name]]
        pictures = self._field(row, row.reads[0], fields)
        made = self.each(row, pictures, size, device)
        return [
            {
                "values": torch.cat([torch.zeros(0, device=device), *(one.flatten() for one in own)]),
                "shapes": torch.tensor([[*one.shape] for one in own], dtype=torch.int64),
            }
            for own in made
        ]

    def read(self, row: Input, features: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
        """The conditions of a row from what a cache has stored, with the samples' own padding."""
        values = features[f"{_part_of(row)}.values"]
        if not row.most:  # features of whole numbers are plain values
            return {row.name: copied_to(device, torch.as_tensor(values))}
        made = []
        for own, shapes in zip(values, features[f"{_part_of(row)}.shapes"], strict=True):
            ends = [prod(shape) for shape in shapes]
            made.append(
                [one.view(*shape) for one, shape in zip(own[: sum(ends)].split(ends), shapes, strict=True)]
                if ends
                else []
            )
        return self.joined(row, made, device)

    def row_of(self, part: str) -> Input:
        """The row of a part of the feature cache."""
        return next(row for row in self.rows if part == _part_of(row))

    def faults(self, given: Mapping[str, int] | Sequence[str] | None) -> Iterator[ContractError]:
        """Rows that have no encoder or the same name, and fields that the dataset does not give (None: not
        known), or of which it gives another number of pictures."""
        where = f"task.predictor, {place_of_object(self.predictor)}"
        names = [name for row in self._own for name in row.conditions]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield ContractError(f"two rows of `inputs` make the condition `{name}`", where=where)
        for row in self._own:
            if row.encoder == "image_encoder" and self.image_encoder is None:
                yield ContractError(
                    f"the input `{row.name}` needs an image encoder, but the task has none",
                    where="task.image_encoder",
                    accepted="a component, such as `image_encoder: {type: ..., from_pretrained: ...}`",
                )
        for name in self.names if given is not None else ():
            if name not in (known := given or ()):
                yield ContractError(
                    f"the predictor needs the field `{name}` of each sample, which the dataset does not give",
                    where=where,
                    accepted=", ".join([*OF_CLIP, *known]),
                    hint=did_you_mean(name, known)
                    or f"name its column in the sources: `columns: {{fields: [{{name: {name}}}]}}`",
                )
        several = given if isinstance(given, Mapping) else {}
        for name in [name for name, most in several.items() if most and name not in self._read]:
            yield ContractError(
                f"the sources name pictures `{name}`, but the predictor does not read them",
                where=where,
                accepted=", ".join(self.names) or "no further field",
                hint="set the option of the predictor that makes them an input (of some, `references`), or"
                " remove them from columns.fields",
            )
        for row in self._own:
            for name in row.reads:
                if several.get(name, row.most) > row.most or (row.most and several.get(name) == 0):
                    yield ContractError(
                        f"the input `{row.name}` takes {_pictures(row.most)} of the field `{name}`, but the"
                        f" dataset gives {_pictures(several[name])}",
                        where=where,
                        hint="columns.fields of the sources sets `kind`"
                        + (f": images, and `most`: {row.most} or less" if row.most else ": clip or number"),
                    )

    def _field(self, row: Input, name: str, fields: Mapping[str, Any]) -> Any:
        if name in fields:
            return fields[name]
        raise ContractError(
            f"the input `{row.name}` of the predictor reads the field `{name}`, which is not given",
            where=f"task.predictor, {place_of_object(self.predictor)}",
            accepted=", ".join(fields) or "no field: the batch has neither pixels nor fields",
            hint=did_you_mean(name, fields)
            or f"give the samples of the dataset a value `{name}`; when sampling: --input {name}=FILE",
        )


def _pictures(most: int) -> str:
    return f"up to {plural(most, 'picture')} of their own size" if most else "one value"


def picture_of(image: Tensor) -> Tensor:
    """uint8 [3,Y,X] of an image or the first frame of a clip [3,F,Y,X], of uint8 or from -1 to 1."""
    if image.dtype == torch.uint8:
        return image if image.dim() == 3 else image[:, 0]
    return ((image[:, 0] + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def _zeroed(values: Tensor, out: Sequence[bool]) -> Tensor:
    if not any(out):
        return values
    kept = copied_to(values.device, ~torch.tensor(out)).view(-1, *[1] * (values.dim() - 1))
    return torch.where(kept, values, torch.zeros_like(values))


def _beside_clip(row: Input) -> tuple[str, ...]:
    """The fields that a row reads beside the clip and its parts."""
    return tuple(name for name in row.reads if name not in OF_CLIP)


def _part_of(row: Input) -> str:
    """The name of a row's part of the feature cache."""
    return row.name if row.name in (FRAMES, IMAGES) else f"input {row.name}"
