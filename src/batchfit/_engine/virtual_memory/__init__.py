"""A memory limit for the CPU: a step that exceeds it raises an OOM as on a GPU.

Front door: `memory.py` (`batchfit.virtual_memory`).
"""
