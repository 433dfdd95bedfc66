"""Sizes found before, in a file: the key of a workload, and the SQLite file of sizes."""
