"""`batchfit.sweep`: a search and a measurement for every configuration of a grid.

Front door: `sweep.py`.
"""
