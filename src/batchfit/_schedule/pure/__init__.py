"""Sizes as functions of progress, without torch."""
