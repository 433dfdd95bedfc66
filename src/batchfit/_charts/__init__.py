"""_charts."""
