"""Decisions: pure functions and immutable values that never touch a device (standard library only)."""
