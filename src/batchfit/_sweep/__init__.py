"""_sweep."""
