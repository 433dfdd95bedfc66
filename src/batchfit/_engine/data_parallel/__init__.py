"""Runs one training batch on one process, or on all ranks of DDP or FSDP2, which vote on each retry.

`interface.py` declares the strategies, `strategy.py` chooses one of `single.py`, `ddp.py` and `fsdp.py`;
`pure/protocol.py` decides what votes lead to.
"""
