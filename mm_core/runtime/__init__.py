"""The processes of a run: ranks, their groups and meshes, agreement, launching, signals, watchdog, output."""
