"""A stored run at work: opening it, sampling clips, answering prompts, evaluating a checkpoint."""
