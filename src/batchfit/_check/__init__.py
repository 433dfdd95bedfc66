"""`batchfit.check_memory`: whether a program needs more memory than its stored baseline, and at which line.

Front door: `check.py`.
"""
