"""_init."""
