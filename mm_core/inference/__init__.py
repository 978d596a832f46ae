"""A stored run at work: commands' and Python's ways to sample clips, answer and evaluate a checkpoint."""
