"""Who holds memory at the peak, decided without torch."""
