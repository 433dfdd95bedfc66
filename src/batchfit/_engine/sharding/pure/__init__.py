"""What is asked for, without torch."""
