"""Devices and their memory: which one, how much, readings, limits, and what is an OOM.

`interface.py` declares a device, `cuda.py` and `cpu.py` are the kinds, `oom.py` recognises out-of-memory
errors.
"""
