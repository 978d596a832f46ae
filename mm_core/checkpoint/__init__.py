"""Checkpoints of a run: saving, opening, keeping, comparing them; whole or absent, exact over ranks."""
