"""`batchfit.GradientNoise`: the gradient noise scale, and the batch size that it suggests.

Front door: `gradient_noise.py`.
"""
