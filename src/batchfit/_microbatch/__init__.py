"""_microbatch."""
