"""Diffusion: flow-matching noise schedulers, samplers, autoencoders, text encoders, their model folders."""

from mm_core.diffusion import rectified_flow
from mm_core.diffusion.encoders.hf_folder import ModelFolder
from mm_core.diffusion.encoders.text import HFTextEncoder, HFTokenizer

__all__ = ["HFTextEncoder", "HFTokenizer", "ModelFolder", "rectified_flow"]
