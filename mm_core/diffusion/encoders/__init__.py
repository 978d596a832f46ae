"""Autoencoders and text encoders that the core ships, read from folders of Transformers' layout."""
