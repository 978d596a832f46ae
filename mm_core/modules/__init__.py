"""Edits to modules: path patterns, freezing, tying, casting, initialisation, adapter layers, FLOPs."""
