"""Diffusers' pipelines (https://github.com/huggingface/diffusers) for mm_core."""

from mm_diffusers.config import TransformerConfig
from mm_diffusers.families import UNUSED, Encoded, Family

__all__ = ["UNUSED", "Encoded", "Family", "TransformerConfig"]
