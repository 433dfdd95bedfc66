"""Knees, steady times and bottlenecks, decided without torch."""
