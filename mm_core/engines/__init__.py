"""Engines: how a task is sharded over devices and stepped."""
