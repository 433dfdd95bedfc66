"""What CUDA kernels allocate, known without a GPU: dispatch, autocast, copies, workspaces."""
