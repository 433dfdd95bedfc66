"""The commands of `batchfit`, a module per command."""
