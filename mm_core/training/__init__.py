"""Training: the training loop, assembling a run from its config, and what happens between its steps."""
