"""The feature cache: what frozen components compute, by the content that it is computed from."""
