"""Training: the loop, what a run is put together from, and what happens between its steps."""
