"""Which configurations run, and where; without torch."""
