"""_schedule."""
