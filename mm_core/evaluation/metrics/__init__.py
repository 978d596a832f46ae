"""Metrics of held-out samples: pure functions, and their sums, exact over ranks."""
