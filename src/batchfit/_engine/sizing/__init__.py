"""Which microbatch size is next, and what is learned from each batch.

`interface.py` declares what callers use; `uniform.py` sizes batches of equal samples, `ragged.py` batches of
unequal lengths.
"""
