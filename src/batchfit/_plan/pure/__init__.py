"""What a plan consists of, decided without torch."""
