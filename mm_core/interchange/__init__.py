"""Weights in and out: exporting, importing, listing and comparing the weights files of other libraries."""
