"""`batchfit.explain_oom` and `batchfit why`: what filled the memory, from PyTorch's snapshots.

Front door: `why.py`. `record.py` is `batchfit.record_oom`, which writes such snapshots.
"""
