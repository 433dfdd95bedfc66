"""The layout that a user asks for, parsed and checked without torch."""
