"""Engines: how a task is spread over devices."""
