"""What the features are made of: trials, snapshots, traces, devices. No package here imports a feature.

Two pairs are easily confused. `distributed/` is how ranks agree on any value; `data_parallel/` is one
training batch on all of them. `virtual_memory/` limits real steps on a CPU; `trace/` runs none, and gives
what they would allocate to `allocator/`, the model of the CUDA caching allocator.
"""
