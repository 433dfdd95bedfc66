"""`batchfit.predict_batch_size`: the largest batch size, with no GPU and without running a step.

Front door: `predict.py`.
"""
