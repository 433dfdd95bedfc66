"""_explain."""
