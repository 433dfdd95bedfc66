"""Estimates and decisions from gradient norms, without torch."""
