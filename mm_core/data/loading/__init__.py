"""Loading of samples: their order, the worker processes that read them, and handling of unreadable ones."""
