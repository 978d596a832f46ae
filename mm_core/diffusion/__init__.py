"""Flow matching, samplers, and the codecs and text encoders that the core ships."""

from mm_core.diffusion.hf_folder import ModelFolder
from mm_core.diffusion.text import HFTextEncoder, HFTokenizer
from mm_core.errors import first_line
from mm_core.tokenizer import open_tokenizer

__all__ = ["HFTextEncoder", "HFTokenizer", "ModelFolder", "first_line", "open_tokenizer"]
