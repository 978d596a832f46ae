"""The published architectures of Wan 2.1 and 2.2, as data; torch-free.

Each preset names a published repository and its architecture, with the field names of Diffusers'
`WanTransformer3DModel`. The values come from `get_transformer_config` in Diffusers'
scripts/convert_wan_to_diffusers.py and from wan/configs in github.com/Wan-Video/Wan2.1 and Wan2.2.
tests/test_presets.py compares each tensor with them, and the totals with the sizes of the published files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType

# Upper limits for the sizes of an architecture. A config.json above them is refused: no model of that size
# exists, and an attempt to build one would never end.
LARGEST = 100_000
MOST_LAYERS, LARGEST_HEAD, MOST_POSITIONS = 1000, 1024, 32768
_LARGEST = {
    "num_layers": MOST_LAYERS,
    "attention_head_dim": LARGEST_HEAD,
    "rope_max_seq_len": MOST_POSITIONS,
}

T2V_BOUNDARY, I2V_BOUNDARY = 0.875, 0.9  # of Wan 2.2's two published pairs of experts


@dataclass(frozen=True)
class Architecture:
    """Fields of `WanTransformer3DModel`. The defaults are those of Diffusers' class: the 14B text-to-video
    model."""

    patch_size: tuple[int, int, int] = (1, 2, 2)
    num_attention_heads: int = 40
    attention_head_dim: int = 128
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    freq_dim: int = 256
    ffn_dim: int = 13824
    num_layers: int = 40
    cross_attn_norm: bool = True
    qk_norm: str = "rms_norm_across_heads"
    eps: float = 1e-6
    image_dim: int | None = None
    added_kv_proj_dim: int | None = None
    rope_max_seq_len: int = 1024
    pos_embed_seq_len: int | None = None

    @property
    def width(self) -> int:
        """Channels of one token in Wan's transformer."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def fields(self) -> dict[str, object]:
        """Arguments of Diffusers' `WanTransformer3DModel`, by name."""
        return asdict(self)


DEFAULTS: Mapping[str, object] = MappingProxyType(Architecture().fields)


def largest(field: str) -> int:
    """The largest accepted value for one field of a Wan transformer's architecture."""
    return _LARGEST.get(field, LARGEST)


@dataclass(frozen=True)
class Preset:
    """A published Wan transformer.

    Attributes:
        source: repository that publishes the config.json.
        architecture: fields of the transformer.
        boundary: for a model of two transformers, the share of the timesteps where the high-noise one begins
            (`boundary_ratio` in the repository's model_index.json). None for a single transformer.
    """

    source: str
    architecture: Architecture
    boundary: float | None = None


_LARGE = Architecture()
_SMALL = Architecture(num_attention_heads=12, num_layers=30, ffn_dim=8960)
# 16 noisy channels, 16 of the given frames and 4 of their mask; CLIP's image features beside the text.
_I2V = Architecture(in_channels=36, image_dim=1280, added_kv_proj_dim=5120)
_A14B_I2V = Architecture(in_channels=36)
_FLF2V = replace(_I2V, pos_embed_seq_len=514)  # 257 CLIP tokens of each of the two frames
_TI2V = Architecture(num_attention_heads=24, num_layers=30, ffn_dim=14336, in_channels=48, out_channels=48)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "wan2.1-t2v-1.3b": Preset("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", _SMALL),
        "wan2.1-t2v-14b": Preset("Wan-AI/Wan2.1-T2V-14B-Diffusers", _LARGE),
        "wan2.1-i2v-14b-480p": Preset("Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", _I2V),
        "wan2.1-i2v-14b-720p": Preset("Wan-AI/Wan2.1-I2V-14B-720P-Diffusers", _I2V),
        "wan2.1-flf2v-14b-720p": Preset("Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers", _FLF2V),
        # Either of the two experts.
        "wan2.2-t2v-a14b": Preset("Wan-AI/Wan2.2-T2V-A14B-Diffusers", _LARGE, T2V_BOUNDARY),
        "wan2.2-i2v-a14b": Preset("Wan-AI/Wan2.2-I2V-A14B-Diffusers", _A14B_I2V, I2V_BOUNDARY),
        "wan2.2-ti2v-5b": Preset("Wan-AI/Wan2.2-TI2V-5B-Diffusers", _TI2V),
    }
)


def presets_of(architecture: Architecture) -> list[str]:
    """Names of the Wan presets with this architecture. Several published models may share one."""
    return [name for name, preset in PRESETS.items() if preset.architecture == architecture]
