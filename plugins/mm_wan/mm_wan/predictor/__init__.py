"""Wan's predictors: one transformer, or a pair of experts, and their FLOPs."""
