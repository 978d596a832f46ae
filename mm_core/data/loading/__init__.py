"""Which samples a rank reads, in which order, by which processes, and what happens to bad ones."""
