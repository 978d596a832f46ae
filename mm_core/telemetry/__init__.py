"""Telemetry of a training run: metrics, trackers, times, FLOPs counted by torch, progress, profiles."""
