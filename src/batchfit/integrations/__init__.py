"""Frameworks: one module or package for each, imported by the user and by nothing else here."""
