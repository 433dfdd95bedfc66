"""What is known about microbatch sizes, decided without torch."""
