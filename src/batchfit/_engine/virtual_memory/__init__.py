"""A CPU that runs out of memory like a GPU.

Front door: `memory.py` (`batchfit.virtual_memory`).
"""
