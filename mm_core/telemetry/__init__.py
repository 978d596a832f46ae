"""What a run tells while it trains: figures, trackers, times, FLOPs torch counts, progress, profiles."""
