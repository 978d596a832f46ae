"""Trackers: receive metrics and sampled clips of a run (metrics.jsonl, TensorBoard, W&B, MLflow)."""
