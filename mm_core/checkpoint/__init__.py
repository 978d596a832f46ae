"""Checkpoints of a run: saving, opening, retention, checks at a resume; complete or absent, on any ranks."""
