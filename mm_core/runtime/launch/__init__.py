"""Starting ranks and ending them: launcher, exit codes, signals, a log a rank, the watch over hangs."""
