"""What the own code of a pipeline of Diffusers does not show: a family is data, a dozen lines or fewer.

Sources: the pipelines' `__call__` and `encode_prompt` in Diffusers 0.42.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal


@dataclass(frozen=True)
class Encoded:
    """One of the values that `encode_prompt` returns.

    Attributes:
        name: the argument of the pipeline's call that takes it; "" if none does.
        width: key of the transformer's config with the width of states and vectors.
        kind: states [B,L,D], vectors [B,D], or the mask [B,L] of the states before it.
    """

    name: str
    width: str = ""
    kind: Literal["states", "vector", "mask"] = "states"


UNUSED = Encoded("")


@dataclass(frozen=True)
class Family:
    """A pipeline's recipe.

    Attributes:
        encoded: what `encode_prompt` returns, in its order; the first are the text states. States without a
            mask are used with the states of their padding.
        latents: how the call takes latents: `tokens` [B,N,C'] of patches, or `image` [B,C,H,W].
        patch: (t, h, w) of a token in latents.
        channels: the transformer's `in_channels` are the latents' times this.
        ragged: the text states are a list of [L,D] without padding.
        folded: latents are 2 x 2 of the autoencoder's, channel slowest, normalised by its batch norm.
        off: arguments of the call that switch classifier-free guidance off.
        guidance: `usual` is uncond + s (cond - uncond), off up to 1; `added` is cond + s (cond - uncond), off
            at 0; `rescaled` is the usual one with each token as long as the conditional one.
        references: reference pictures are tokens behind those of the latents; the first column of `img_ids`
            is this for the first picture, and so much more for each further one. None: it takes no picture.
        time_factor: by which the transformer multiplies its time, of lowered precision, on the way to the
            sinusoidal embedding; 0: it keeps float32.
        negated: the pipeline negates what the transformer returns.
        length: most tokens of a caption.
        text_tokens: what in the transformer's `_cp_plan` (names of arguments, numbers of outputs) belongs to
            tokens of text, which attend in one sequence with the picture's; (): it has no such plan.
    """

    encoded: tuple[Encoded, ...]
    latents: Literal["tokens", "image"] = "image"
    patch: tuple[int, int, int] = (1, 2, 2)
    channels: int = 1
    ragged: bool = False
    folded: bool = False
    off: Mapping[str, Any] = field(default_factory=lambda: {"guidance_scale": 1.0})
    guidance: Literal["usual", "added", "rescaled"] = "usual"
    references: tuple[int, int] | None = None
    time_factor: float = 0.0
    negated: bool = False
    length: int = 512
    text_tokens: tuple[str | int, ...] = ()

    @property
    def more(self) -> list[Encoded]:
        """What is encoded beside the text states and their mask."""
        first = 2 if self.encoded[1:] and self.encoded[1].kind == "mask" else 1
        return [each for each in self.encoded[first:] if each.name]

    def text_width(self, config: Mapping[str, Any]) -> int:
        """Width of the text states, by the transformer's config."""
        return int(config[self.encoded[0].width])

    def condition_shapes(self, config: Mapping[str, Any]) -> dict[str, tuple[int | None, ...]]:
        """The conditions that are encoded beside the text states: name -> shape of a sample."""
        found: dict[str, tuple[int | None, ...]] = {}
        before = ""
        for each in self.more:
            if each.kind == "mask":
                found[f"{before}_mask"] = (None,)
            else:
                width = int(config[each.width])
                found[each.name] = (width,) if each.kind == "vector" else (None, width)
                before = each.name
        return found

    def arguments(
        self, text: Any, mask: Any, conditions: Mapping[str, Any], lengths: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """Arguments of the pipeline's call.

        Args:
            text: the text states [B,L,D].
            mask: [B,L] bool, false for padding.
            conditions: as in `condition_shapes`.
            lengths: true values of each row of the mask; None: they are counted.
        """
        first, *others = self.encoded
        rows = text
        if self.ragged:
            lengths = mask.sum(1).tolist() if lengths is None else lengths
            rows = [own[:length] for own, length in zip(text, lengths, strict=True)]
        found, before = {first.name: rows}, ""
        for each in others:
            if each.kind == "mask":
                found[each.name] = (conditions[f"{before}_mask"] if before else mask).long()
            elif each.name:
                found[each.name], before = conditions[each.name], each.name
        return found

    def sizes(self, shape: Sequence[int], scale: int) -> dict[str, int]:
        """The size of latents [B,C,T,H,W] in pixels, as arguments of the call."""
        pixels = scale * (2 if self.folded else 1)
        return {"height": shape[3] * pixels, "width": shape[4] * pixels}


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Flux2KleinPipeline": Family(
            (Encoded("prompt_embeds", "joint_attention_dim"), UNUSED),
            patch=(1, 1, 1),
            folded=True,
            references=(10, 10),
            time_factor=1000.0,
            text_tokens=("encoder_hidden_states", "txt_ids"),
        ),
        "FluxPipeline": Family(
            (
                Encoded("prompt_embeds", "joint_attention_dim"),
                Encoded("pooled_prompt_embeds", "pooled_projection_dim", "vector"),
                UNUSED,
            ),
            latents="tokens",
            channels=4,
            off={"true_cfg_scale": 1.0},
            time_factor=1000.0,
            text_tokens=("encoder_hidden_states", "txt_ids"),
        ),
        "QwenImagePipeline": Family(
            (Encoded("prompt_embeds", "joint_attention_dim"), Encoded("prompt_embeds_mask", kind="mask")),
            latents="tokens",
            channels=4,
            off={"true_cfg_scale": 1.0},
            guidance="rescaled",
            time_factor=1.0,
            length=1024,
            text_tokens=("encoder_hidden_states", "encoder_hidden_states_mask", 1),
        ),
        "StableDiffusion3Pipeline": Family(
            (
                Encoded("prompt_embeds", "joint_attention_dim"),
                UNUSED,
                Encoded("pooled_prompt_embeds", "pooled_projection_dim", "vector"),
                UNUSED,
            ),
            length=256,
        ),
        "ZImagePipeline": Family(
            (Encoded("prompt_embeds", "cap_feat_dim"), UNUSED),
            ragged=True,
            off={"guidance_scale": 0.0},
            guidance="added",
            negated=True,
        ),
    }
)
"""Pipelines' classes -> their recipes."""
