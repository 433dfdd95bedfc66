"""A trace of one rank of FSDP2, DDP or ZeRO 1: the model is sharded over fake ranks, in one process.

Front door: `sharding.py` (`changes_for`).
"""
