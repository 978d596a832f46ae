"""The files of a checkpoint: their names and checksums, how tensors and facts are written and read."""
