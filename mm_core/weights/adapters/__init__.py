"""Adapters (LoRA, DoRA) of a task: adding them to modules, their files, and which layers a file fits."""
