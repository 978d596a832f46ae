"""The task `text_to_video`: training diffusion models of videos, and sampling from them."""
