"""Base classes for authors of plugins: tasks, predictors and datasets with the least that one must write."""
