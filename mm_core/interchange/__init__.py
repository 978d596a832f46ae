"""Commands on weights: planning and writing an export, importing, listing and comparing."""
