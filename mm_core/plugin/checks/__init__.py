"""Checks of components: against the contract of their kind, their config and their target's file."""
