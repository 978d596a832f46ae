"""Held-out rows while training and after: which rank takes which, losses, predictions, sampled clips."""
