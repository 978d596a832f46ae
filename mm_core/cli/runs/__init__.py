"""Commands on a stored run: `mm sample`, `mm chat`, `mm eval`, `mm report`."""
