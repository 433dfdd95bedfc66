"""Copies of the user's state (no memory snapshots of torch): taken before a trial or a retry, then restored.

Front door: `snapshot.py` (host copies, for trials); `batch_undo.py` undoes one backward pass.
"""
