"""Which samples are in which microbatch, decided without torch."""
