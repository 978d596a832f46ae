"""Commands on a config: `mm train` and `mm validate`."""
