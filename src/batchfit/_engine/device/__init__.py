"""Devices and their memory: which one, how much, readings, limits, and what is an OOM.

`device.py` declares a device and has the CPU, `gpu.py` the other kinds.
"""
