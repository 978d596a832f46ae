"""Weights in and out: exporting, importing, listing and comparing what files of libraries hold."""
