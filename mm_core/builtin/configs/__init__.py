"""Config dataclasses of the built-in components; they do not import torch."""
