"""_profile."""
