"""What CUDA kernels allocate, known without a GPU: dispatch, autocast, copies, workspaces.

`dispatch.py` says which kernel an operation becomes, `workspaces.py` and `library_kernels.py` what it
allocates beside its result. cuBLAS keeps a workspace per thread: which operations use it is in
`library_kernels.py`, its size per GPU in `allocator/gpus.py`, and `trace/recorder.py` allocates it at the
first product.
"""
