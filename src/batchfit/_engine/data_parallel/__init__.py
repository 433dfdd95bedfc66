"""One batch on all ranks of DDP or FSDP2: votes, all-reduce, retries together.

`ddp.py` and `fsdp.py` run a batch on the ranks; `pure/protocol.py` decides what votes lead to.
"""
