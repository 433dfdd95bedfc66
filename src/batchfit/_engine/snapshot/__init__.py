"""The user's state: taken before a trial or a retry, and restored bit for bit.

Front door: `snapshot.py` (host copies, for trials); `batch_undo.py` undoes one backward pass.
"""
