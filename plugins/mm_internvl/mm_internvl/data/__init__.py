"""Conversations about images and videos, as InternVL takes them: rows, tokens, labels and tiles."""
