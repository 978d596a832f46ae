"""Context parallelism: the ranks of a context group compute parts of the same samples' tokens."""
