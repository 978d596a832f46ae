"""Figures of held-out samples: pure functions, and the metrics that sum them exactly over ranks."""
