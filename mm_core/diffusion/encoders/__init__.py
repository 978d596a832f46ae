"""Autoencoders and text encoders included in mm_core, and the Transformers model folders they read."""
