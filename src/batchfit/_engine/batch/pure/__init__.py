"""One microbatch as a value, without torch."""
