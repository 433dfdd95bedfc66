"""pure."""
