"""The protocol of the ranks, decided without torch."""
