"""Config dataclasses of the built-in components: torch-free."""
