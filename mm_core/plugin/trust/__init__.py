"""Code that somebody else wrote: which of it may run, and how it is checked before it runs."""
