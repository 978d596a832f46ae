"""Commands: one small module each, imported when it is chosen; parsing and printing only."""
