"""Recording the numbers of training steps, so that two runs can be compared module by module."""
