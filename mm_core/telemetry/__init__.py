"""What a run tells while it trains: windows of figures, times, FLOPs, progress, profiles."""
