"""What the own code of a pipeline of Diffusers does not show: a family is data, a dozen lines or fewer.

Sources: the pipelines' `__call__` and `encode_prompt` in Diffusers 0.42.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from mm_core.errors import ContractError

PAGE = 'the page "Add a Diffusers family"'
_Kind = Literal["states", "vector", "mask"]
_Latents = Literal["tokens", "image", "video"]
_Guidance = Literal["usual", "added", "rescaled"]


def _check(recipe: Any, name: str, kind: Any) -> None:
    """Raises ContractError for a word that a recipe does not know: Python takes any."""
    if (found := getattr(recipe, name)) not in get_args(kind):
        raise ContractError(
            f"{name} of a recipe is {found!r}",
            where=f"{type(recipe).__name__} of mm_diffusers",
            accepted=", ".join(get_args(kind)),
            hint=f"{PAGE} lists what each field means",
        )


@dataclass(frozen=True)
class Encoded:
    """One of the values that `encode_prompt` returns.

    Attributes:
        name: the argument of the pipeline's call that takes it; "" if none does.
        width: key of the transformer's config with the width of states and vectors.
        layers: key of the transformer's config with the number of states of a token, [B,L,n,D]; "": one.
        kind: states [B,L,D], vectors [B,D], or the mask [B,L] of the states before it.
    """

    name: str
    width: str = ""
    kind: _Kind = "states"
    layers: str = ""

    def __post_init__(self) -> None:
        _check(self, "kind", _Kind)
        if self.name and self.kind != "mask" and not self.width:
            raise ContractError(
                f"Encoded({self.name!r}) of a recipe names no width",
                where="Encoded of mm_diffusers",
                accepted=f"Encoded({self.name!r}, KEY), with the key of the transformer's config.json",
                hint=f'a mask has none: Encoded({self.name!r}, kind="mask")',
            )


UNUSED = Encoded("")


@dataclass(frozen=True)
class Family:
    """A pipeline's recipe.

    Attributes:
        encoded: what `encode_prompt` returns, in its order; the first are the text states. States without a
            mask are used with the states of their padding.
        latents: how the call takes latents: `tokens` [B,N,C'] of patches, `image` [B,C,H,W], or `video`
            [B,C,T,H,W].
        patch: (t, h, w) of a token in latents.
        channels: the transformer's `in_channels` are the latents' times this, and what is less.
        strides: attributes of the pipeline with the frames, and the rows and columns, of a latent; without
            the first, it makes pictures.
        clip_conditions: further conditions that the call takes, such as `fps`: name -> its argument.
        ragged: the text states are a list of [L,D] without padding.
        folded: latents are 2 x 2 of the autoencoder's, channel slowest, normalised by its batch norm.
        off: arguments of the call that switch classifier-free guidance off.
        guidance: `usual` is uncond + s (cond - uncond), off up to 1; `added` is cond + s (cond - uncond), off
            at 0; `rescaled` is the usual one with each token as long as the conditional one.
        distilled: a setting of the pipeline with which guidance is off at every scale.
        references: reference pictures are tokens behind those of the latents; the first column of `img_ids`
            is this for the first picture, and so much more for each further one, or 0 if it takes one alone.
            None: it takes no picture.
        areas: of pipelines that edit pictures, which have at least one: the pixels to which a reference
            picture is resized for the autoencoder, and for the text encoder, which sees it too. Positions are
            by `img_shapes`.
        first_frame: clips begin with a given picture: channels behind those of the latents are its latents
            and a mask, and an image encoder of the pipeline encodes it too.
        call: class of the pipeline whose call prepares; "": its own.
        time_factor: by which the transformer multiplies its time, of lowered precision, on the way to the
            sinusoidal embedding; 0: it keeps float32.
        negated: the pipeline negates what the transformer returns.
        length: most tokens of a caption.
        text_tokens: what in the transformer's `_cp_plan` (names of arguments, numbers of outputs) belongs to
            tokens of text, which attend in one sequence with the picture's; (): text is read by
            cross-attention. None: Diffusers has no such plan.
    """

    encoded: tuple[Encoded, ...]
    latents: _Latents = "image"
    patch: tuple[int, int, int] = (1, 2, 2)
    channels: int = 1
    strides: tuple[str, str] = ("", "vae_scale_factor")
    clip_conditions: Mapping[str, str] = field(default_factory=dict)
    ragged: bool = False
    folded: bool = False
    off: Mapping[str, Any] = field(default_factory=lambda: {"guidance_scale": 1.0})
    guidance: _Guidance = "usual"
    distilled: str = ""
    references: tuple[int, int] | None = None
    areas: tuple[int, int] | None = None
    first_frame: bool = False
    call: str = ""
    time_factor: float = 0.0
    negated: bool = False
    length: int = 512
    text_tokens: tuple[str | int, ...] | None = None

    def __post_init__(self) -> None:
        _check(self, "latents", _Latents)
        _check(self, "guidance", _Guidance)

    @property
    def more(self) -> list[Encoded]:
        """What is encoded beside the text states and their mask."""
        named = [each for each in self.encoded[1:] if each.name]
        return named[1:] if named and named[0].kind == "mask" else named

    def text_width(self, config: Mapping[str, Any]) -> int:
        """Width of the text states, by the transformer's config."""
        first = self.encoded[0]
        return _number(config, first.width) * int(config.get(first.layers, 1))

    def condition_shapes(self, config: Mapping[str, Any]) -> dict[str, tuple[int | None, ...]]:
        """The conditions that are encoded beside the text states: name -> shape of a sample."""
        found: dict[str, tuple[int | None, ...]] = {}
        before = ""
        for each in self.more:
            if each.kind == "mask":
                found[f"{before}_mask"] = (None,)
            else:
                width = _number(config, each.width)
                found[each.name] = (width,) if each.kind == "vector" else (None, width)
                before = each.name
        return found

    def arguments(
        self,
        config: Mapping[str, Any],
        text: Any,
        mask: Any,
        conditions: Mapping[str, Any],
        lengths: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Arguments of the pipeline's call.

        Args:
            config: the transformer's.
            text: the text states [B,L,D].
            mask: [B,L] bool, false for padding.
            conditions: as in `condition_shapes`.
            lengths: true values of each row of the mask; None: they are counted.
        """
        first, *others = self.encoded
        if first.layers:
            text = text.unflatten(2, (-1, int(config[first.width])))
        rows = text
        if self.ragged:
            lengths = mask.sum(1).tolist() if lengths is None else lengths
            rows = [own[:length] for own, length in zip(text, lengths, strict=True)]
        found, before = {first.name: rows}, ""
        for each in others:
            if each.kind == "mask":
                found[each.name] = (conditions[f"{before}_mask"] if before else mask).bool()
            elif each.name:
                found[each.name], before = conditions[each.name], each.name
        return found


def _number(config: Mapping[str, Any], key: str) -> int:
    if not isinstance(found := config.get(key), int):
        numbers = [name for name, value in config.items() if type(value) is int]
        raise ContractError(
            f"config.json of the transformer has no number {key!r}, which the recipe names as a width",
            where=str(config.get("_class_name", "transformer")),
            accepted=", ".join(numbers) or "a key of config.json",
            hint=f"correct the recipe ({PAGE}), or model_index.json if it names another pipeline",
        )
    return found


_FLUX = Family(
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
)

_HUNYUAN_15 = Family(
    (
        Encoded("prompt_embeds", "text_embed_dim"),
        Encoded("prompt_embeds_mask", kind="mask"),
        Encoded("prompt_embeds_2", "text_embed_2_dim"),
        Encoded("prompt_embeds_mask_2", kind="mask"),
    ),
    latents="video",
    patch=(1, 1, 1),
    channels=2,
    strides=("vae_scale_factor_temporal", "vae_scale_factor_spatial"),
    off={},  # by its guider
    time_factor=1.0,
    length=1000,
)

_QWEN = Family(
    (Encoded("prompt_embeds", "joint_attention_dim"), Encoded("prompt_embeds_mask", kind="mask")),
    latents="tokens",
    channels=4,
    off={"true_cfg_scale": 1.0},
    guidance="rescaled",
    time_factor=1.0,
)

# Their own calls take no latents of pictures, and one row alone.
_QWEN_EDIT = replace(
    _QWEN, call="QwenImagePipeline", references=(1, 0), areas=(1024**2, 1024**2), length=1024
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Flux2KleinPipeline": Family(
            (Encoded("prompt_embeds", "joint_attention_dim"), UNUSED),
            patch=(1, 1, 1),
            folded=True,
            distilled="is_distilled",
            references=(10, 10),
            time_factor=1000.0,
            text_tokens=("encoder_hidden_states", "txt_ids"),
        ),
        "FluxKontextPipeline": replace(_FLUX, references=(1, 0)),
        "FluxPipeline": _FLUX,
        "HunyuanVideo15ImageToVideoPipeline": replace(
            _HUNYUAN_15, first_frame=True, call="HunyuanVideo15Pipeline"
        ),
        "HunyuanVideo15Pipeline": _HUNYUAN_15,
        "Krea2Pipeline": Family(
            (
                Encoded("prompt_embeds", "text_hidden_dim", layers="num_text_layers"),
                Encoded("prompt_embeds_mask", kind="mask"),
            ),
            latents="tokens",
            channels=4,
            off={"guidance_scale": 0.0},
            guidance="added",
        ),
        "LTXPipeline": Family(
            (
                Encoded("prompt_embeds", "caption_channels"),
                Encoded("prompt_attention_mask", kind="mask"),
                UNUSED,
                UNUSED,
            ),
            latents="tokens",
            patch=(1, 1, 1),
            strides=("vae_temporal_compression_ratio", "vae_spatial_compression_ratio"),
            clip_conditions={"fps": "frame_rate"},
            length=128,
            text_tokens=(),
        ),
        "QwenImageEditPipeline": _QWEN_EDIT,
        "QwenImageEditPlusPipeline": replace(_QWEN_EDIT, references=(1, 1), areas=(1024**2, 384**2)),
        "QwenImagePipeline": replace(
            _QWEN, text_tokens=("encoder_hidden_states", "encoder_hidden_states_mask", 1)
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


def check_references(kind: str, family: Family, references: int) -> None:
    """Raises ContractError for more reference pictures than a pipeline takes."""
    taken = {name: each.references for name, each in FAMILIES.items() if each.references}
    if references and family.references is None:
        accepted = f"0; {', '.join(taken)} take some"
        raise ContractError(
            f"{kind} takes no reference pictures", where="task.predictor.references", accepted=accepted
        )
    if references > 1 and family.references and not family.references[1]:
        raise ContractError(
            f"{kind} takes one reference picture", where="task.predictor.references", accepted="0, 1"
        )
