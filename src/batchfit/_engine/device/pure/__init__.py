"""The allocator's state as a value, without torch."""
