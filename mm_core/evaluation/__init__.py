"""Held-out rows while training and after it: which rank takes which, losses, metrics and predictions."""
