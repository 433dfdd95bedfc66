"""How long a stability check lasts, decided without torch."""
