"""Predictions for a program on several ranks: the model is spread over them in a trace, on one process.

Front door: `sharding.py` (`changes_for`).
"""
