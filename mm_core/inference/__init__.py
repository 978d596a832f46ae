"""A stored run at work: sampling clips, answering in words, evaluating a checkpoint."""
