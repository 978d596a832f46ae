"""Flow matching, samplers, and the codecs and text encoders that the core ships."""

from mm_core.diffusion import rectified_flow
from mm_core.diffusion.encoders.hf_folder import ModelFolder
from mm_core.diffusion.encoders.text import HFTextEncoder, HFTokenizer

__all__ = ["HFTextEncoder", "HFTokenizer", "ModelFolder", "rectified_flow"]
