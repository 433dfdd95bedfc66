"""Which size a program is started with next, decided without torch."""
