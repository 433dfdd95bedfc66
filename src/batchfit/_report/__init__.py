"""`batchfit.report`: results as one HTML file.

Front door: `report.py`.
"""
