"""`batchfit.BatchSizeScheduler`: batch sizes and learning rates over a training run.

Front door: `scheduler.py`; the kinds of schedules are public, in `batchfit.schedules`.
"""
