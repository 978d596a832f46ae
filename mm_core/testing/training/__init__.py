"""The conformance kits of training: optimizers and learning-rate schedules."""
