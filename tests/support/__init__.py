"""What tests of several rooms share, imported as `support`: tests/ is on the path (pyproject.toml). How ranks
are started, tiny models and runs of them, tensors to compare; and the one-file plugins and the scripts of
ranks that several rooms use."""
