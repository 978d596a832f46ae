"""The processes of a run: ranks, what they agree on, whose fault it is; launching, watching, output."""
