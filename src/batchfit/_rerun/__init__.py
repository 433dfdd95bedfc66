"""_rerun."""
