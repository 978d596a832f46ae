"""Where figures and clips go: files, TensorBoard, W&B, MLflow."""
