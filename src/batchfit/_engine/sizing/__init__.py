"""Which microbatch size is tried next, and what is learned from each batch.

`uniform.py` sizes batches of equal samples, `ragged.py` batches of unequal lengths.
"""
