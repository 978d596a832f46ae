"""The built-in plugin `core`: components that mm_core ships, registered as those of any plugin are."""
