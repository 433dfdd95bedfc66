"""optimizer_step."""
