"""Reading a snapshot and deciding what it means, without torch."""
