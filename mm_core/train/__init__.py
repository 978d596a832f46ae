"""Training: the loop, its parts, the run around it, and the launcher of its ranks."""
