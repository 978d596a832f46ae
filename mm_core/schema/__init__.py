"""Checks values against typed dataclasses: nodes that know their file and line, errors, descriptions."""
