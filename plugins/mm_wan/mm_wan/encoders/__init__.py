"""Wan's VAE, text encoder and image encoder."""
