"""What of a pipeline of Diffusers its own code does not show: a family is data, a dozen lines or fewer.

Sources: the pipelines' `__call__` and `encode_prompt` in Diffusers 0.42.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """A pipeline's recipe.

    Attributes:
        encoded: what `encode_prompt` returns, in its order, as arguments of the pipeline's call: name -> key of
            the transformer's config with the width; "mask" for a mask of the states before it, which is bool
            in training; "" for what the call does not take. The first are the text states.
        latents: how the call takes latents: `tokens` [B,N,C'] of patches, `image` [B,C,H,W], `video`
            [B,C,T,H,W].
        patch: (t, h, w) of a token in latents.
        channels: latent channels are the transformer's `in_channels` over this.
        off: arguments of the call that switch classifier-free guidance off.
        guidance: of the pipeline: `usual` is uncond + s (cond - uncond), off up to 1; `added` is cond + s (cond -
            uncond), off at 0; `rescaled` is the usual one with each token as long as the conditional one.
        ragged: the text states are a list of [L,D] without padding.
        folded: latents are 2 x 2 of the autoencoder's, channel slowest, normalised by its batch norm.
        references: reference pictures are tokens behind those of the latents; the first and the further ones
            have these values in the first column of `img_ids`. None: the model takes no picture.
        negated: the pipeline negates what the transformer returns.
        time_scale: factor by which the transformer multiplies its time.
        length: most tokens of a caption.
        lora: text before module names in LoRA files for ComfyUI and kohya's scripts.
    """

    encoded: Mapping[str, str]
    latents: Literal["tokens", "image", "video"] = "image"
    patch: tuple[int, int, int] = (1, 2, 2)
    channels: int = 1
    off: Mapping[str, Any] = field(default_factory=lambda: {"guidance_scale": 1.0})
    guidance: Literal["usual", "added", "rescaled"] = "usual"
    ragged: bool = False
    folded: bool = False
    references: tuple[int, int] | None = None
    negated: bool = False
    time_scale: float = 1.0
    length: int = 512
    lora: str = "diffusion_model."

    def widths(self, config: Mapping[str, Any]) -> list[int]:
        """Widths of the text states and of what is encoded beside them, by the transformer's config."""
        return [int(config[key]) for key in self.encoded.values() if key not in ("", "mask")]

    def condition_shapes(self, config: Mapping[str, Any]) -> dict[str, tuple[int | None, ...]]:
        """What is encoded beside the text states and their mask: name -> shape of a sample."""
        first, *others = self.encoded.items()
        found: dict[str, tuple[int | None, ...]] = {}
        for name, key in others:
            if key not in ("", "mask"):
                found[name] = (int(config[key]),) if "pooled" in name else (None, int(config[key]))
        return found

    def arguments(self, text: Any, mask: Any, conditions: Mapping[str, Any]) -> list[Any]:
        """What `encode_prompt` would return, of the text states [B,L,D], their mask [B,L] and conditions."""
        found: list[Any] = []
        for place, (name, key) in enumerate(self.encoded.items()):
            if place == 0:
                found.append([own[kept] for own, kept in zip(text, mask, strict=True)] if self.ragged else text)
            elif key == "mask":
                found.append(mask.long() if place == 1 else conditions[f"{before}_mask"].long())
            else:
                found.append(conditions[name] if key else None)
            before = name
        return found

    def sizes(self, shape: Any, scale: int) -> dict[str, int]:
        """Arguments of the call for the size of latents [B,C,T,H,W]: pixels."""
        fold = 2 if self.folded else 1
        return {"height": shape[3] * scale * fold, "width": shape[4] * scale * fold}


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Flux2KleinPipeline": Family(
            {"prompt_embeds": "joint_attention_dim", " ids": ""}, patch=(1, 1, 1), folded=True, references=(10, 10), time_scale=1000
        ),
        "QwenImagePipeline": Family(
            {"prompt_embeds": "joint_attention_dim", "prompt_embeds_mask": "mask"},
            latents="tokens",
            channels=4,
            off={"true_cfg_scale": 1.0},
            guidance="rescaled",
            length=1024,
        ),
        "ZImagePipeline": Family(
            {"prompt_embeds": "cap_feat_dim", " negative": ""},
            off={"guidance_scale": 0.0},
            guidance="added",
            ragged=True,
            negated=True,
        ),
    }
)
"""Pipelines' classes -> their recipes."""
