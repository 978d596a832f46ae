"""A task's initial tensors before training: from weights files, checkpoints, or random initialisation."""
