"""Which losses can be cut into microbatches, decided without torch."""
