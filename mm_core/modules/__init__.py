"""Edits to any module: path patterns, freezing, tying, casting, recorded initialisation, FLOPs."""
