"""Conversations of images and videos as InternVL reads them."""
