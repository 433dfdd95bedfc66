"""Which rank gets which samples, decided without torch."""
