"""A task's tensors before training: from files, from checkpoints, or drawn at random."""
