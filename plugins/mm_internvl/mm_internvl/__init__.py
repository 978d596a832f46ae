"""InternVL 3.5 (https://arxiv.org/abs/2508.18265) for mm_core."""
