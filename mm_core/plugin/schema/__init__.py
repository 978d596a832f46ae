"""Config dataclasses of components: declared fields, checking of values, and their description."""
