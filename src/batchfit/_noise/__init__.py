"""_noise."""
