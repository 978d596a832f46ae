"""Rows of conversations: reading files, turns, files of images, boxes."""
