"""Optimizers, parameter groups, learning-rate schedules, and the exponential moving average of weights."""
