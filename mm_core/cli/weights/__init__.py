"""Commands on files of weights: `mm weights`, `mm import`, `mm export`."""
