"""_find."""
