"""Conversations about images, as rows of tokens: rows, chat templates, processors, packing, questions."""
