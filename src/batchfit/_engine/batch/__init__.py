"""Batches: where they come from, how many samples they have, how they are cut and joined.

Front door: `split.py`. A `Microbatch` is one microbatch of a plan.
"""
