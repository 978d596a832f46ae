"""Entry point of the plugin `wan`: registers its components and imports no torch."""

from mm_core import Component, hookimpl

_TINY = {
    **{"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 12, "rope_max_seq_len": 32},
    **{"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32},
}
"""Fields of a transformer for tests."""


@hookimpl
def mm_predictors() -> list[Component]:
    return [
        Component(
            name="transformer",
            target="mm_wan.predictor.transformer:WanTransformer",
            config="mm_wan.predictor.config:WanTransformerConfig",
            tiny=_TINY,
            summary="Wan 2.1 and 2.2's video transformer, Diffusers' own class",
            aliases=("wandit",),
            licence="Apache-2.0",
            paper="https://arxiv.org/abs/2503.20314",
        ),
        Component(
            name="two_expert",
            target="mm_wan.predictor.two_expert:TwoExpert",
            config="mm_wan.predictor.config:TwoExpertConfig",
            tiny=_TINY,
            summary="Wan 2.2 A14B: two transformers, for high and for low noise, trained together or alone",
            licence="Apache-2.0",
            paper="https://arxiv.org/abs/2503.20314",
        ),
    ]


@hookimpl
def mm_autoencoders() -> list[Component]:
    return [
        Component(
            name="vae",
            target="mm_wan.encoders.vae:WanVAE",
            config="mm_wan.encoders.config:WanVAEConfig",
            tiny="mm_wan.testing:tiny_vae",
            summary="Wan 2.1 and 2.2's causal video autoencoder, Diffusers' own class",
            aliases=("wan_video_vae",),
            licence="Apache-2.0",
            paper="https://arxiv.org/abs/2503.20314",
        )
    ]


@hookimpl
def mm_text_encoders() -> list[Component]:
    return [
        Component(
            name="umt5",
            target="mm_wan.encoders.umt5:WanUMT5",
            config="mm_wan.encoders.config:WanUMT5Config",
            tiny="mm_wan.testing:tiny_umt5",
            summary="UMT5 text encoder as Wan's pipelines use it, Transformers' own class",
            aliases=("UMT5",),
            licence="Apache-2.0",
            paper="https://arxiv.org/abs/2304.09151",
        )
    ]


@hookimpl
def mm_image_encoders() -> list[Component]:
    return [
        Component(
            name="clip_vision",
            target="mm_wan.encoders.clip_vision:WanCLIPVision",
            config="mm_wan.encoders.config:WanCLIPVisionConfig",
            tiny="mm_wan.testing:tiny_clip_vision",
            summary="CLIP's image encoder as Wan 2.1's image-to-video pipelines use it",
            licence="MIT",
            paper="https://arxiv.org/abs/2103.00020",
        )
    ]


@hookimpl
def mm_schedulers() -> list[Component]:
    return [
        Component(
            name="flow_match",
            target="mm_wan.schedulers.flow_match:WanFlowMatch",
            config="mm_wan.schedulers.config:WanFlowMatchConfig",
            summary="Wan's flow matching, sampled by Diffusers' UniPC, Euler or DPM-Solver++",
            aliases=("wan_flow_match_scheduler",),
            licence="Apache-2.0",
            paper="https://arxiv.org/abs/2503.20314",
        )
    ]


@hookimpl
def mm_weight_formats() -> list[Component]:
    return [
        Component(
            name="diffusers",
            target="mm_wan.formats:WanDiffusers",
            summary="the folder of a Diffusers WanPipeline, or of its transformer alone",
        ),
        Component(
            name="original",
            target="mm_wan.formats:WanOriginal",
            summary="Wan's transformer as Wan-AI publishes it",
        ),
        Component(
            name="file",
            target="mm_wan.formats:WanFile",
            summary="a Wan model in one file, as Wan-AI and ComfyUI publish them; only read",
        ),
    ]
