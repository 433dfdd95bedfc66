"""`batchfit.GradientNoise`: the gradient noise scale, and the batch size it speaks for.

Front door: `gradient_noise.py`.
"""
