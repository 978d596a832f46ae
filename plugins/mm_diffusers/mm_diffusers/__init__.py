"""Diffusers' pipelines (https://github.com/huggingface/diffusers) for mm_core."""
