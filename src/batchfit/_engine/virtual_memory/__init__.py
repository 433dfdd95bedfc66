"""A CPU that is out of memory as a GPU would be.

Front door: `memory.py` (`batchfit.virtual_memory`).
"""
