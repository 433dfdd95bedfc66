"""What a check decides without torch: what a baseline says, what has changed, and whether that passes."""
