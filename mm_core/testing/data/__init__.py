"""The conformance kits of data: datasets and video readers."""
