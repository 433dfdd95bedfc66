"""A model of the CUDA caching allocator: blocks, pools, and the replay of a step's allocations.

Pure. `footprint.py` is what a step allocates as a function of the batch size, `caching.py` the allocator,
`replay.py` runs the one through the other, `gpus.py` lists the memory of GPUs.
"""
