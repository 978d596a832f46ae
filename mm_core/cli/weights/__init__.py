"""Commands on weights files: `mm weights`, `mm import`, `mm export`."""
