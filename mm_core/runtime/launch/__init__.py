"""Starting and ending ranks: launcher, exit codes, signals, one log per rank, the watchdog against hangs."""
