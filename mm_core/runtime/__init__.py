"""The processes of a run: ranks, agreement and errors among them, launching, signals, watchdog, output."""
