"""`batchfit.explain_memory`: what the peak consists of, and what would change it.

Front door: `explain.py`.
"""
