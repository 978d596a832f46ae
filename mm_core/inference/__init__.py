"""A stored run at work: opening it to sample clips, to answer prompts, to evaluate a checkpoint."""
