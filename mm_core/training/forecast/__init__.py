"""What a run needs before it starts: memory by phase and part, and seconds a step, from fake tensors."""
