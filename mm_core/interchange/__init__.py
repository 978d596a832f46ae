"""Weights in and out: export to other libraries' formats, import of theirs, listing what files hold."""
