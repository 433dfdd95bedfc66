"""One module a framework: each may import torch, its framework, and batchfit's public names."""
