"""The processes of a run: ranks and what they agree on, launching, signals, logs, what a kill leaves."""
