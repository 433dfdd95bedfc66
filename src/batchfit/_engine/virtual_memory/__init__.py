"""virtual_memory."""
