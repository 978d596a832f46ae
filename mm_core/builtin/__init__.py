"""The built-in plugin `core`: components that mm_core ships, registered like any plugin's."""
