"""Flow matching, samplers, the codecs and text encoders of the core and the model folders they read."""

from mm_core.diffusion import rectified_flow
from mm_core.diffusion.encoders.hf_folder import ModelFolder
from mm_core.diffusion.encoders.text import HFTextEncoder, HFTokenizer

__all__ = ["HFTextEncoder", "HFTokenizer", "ModelFolder", "rectified_flow"]
