"""`batchfit.ResizableLoader`: a DataLoader whose batch size changes while it runs.

Front door: `loader.py`.
"""
