"""`batchfit.run_largest`: a whole program, started again with a smaller batch after an OOM.

Front door: `run_largest.py`.
"""
