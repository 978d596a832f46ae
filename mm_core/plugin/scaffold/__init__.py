"""`mm plugins new`: writes a plugin's first files, from templates that also are the examples of the pages."""
