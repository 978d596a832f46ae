"""The datasets that the core ships: text rows and videos with captions."""
