"""`batchfit.plan`: which settings fit on which GPU, before anybody rents one. Nothing is downloaded or run.

Front door: `plan.py`.
"""
