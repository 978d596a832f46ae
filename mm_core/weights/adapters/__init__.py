"""Adapters (LoRA, DoRA) of a task: putting them in, their files, and where a file's layers belong."""
