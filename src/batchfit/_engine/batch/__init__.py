"""Batches: where they come from, how many samples they have, how they are cut and joined.

Front door: `split.py`. A `Piece` is one microbatch of a plan.
"""
