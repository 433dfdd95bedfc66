"""Workloads: what a step reaches, where it runs, how a target names it, whose error it was."""
