"""Weights on disk: formats, key maps, streaming into shards and out of checkpoints, adapters."""
