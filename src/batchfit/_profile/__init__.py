"""`batchfit.profile_throughput`: samples per second by batch size, the knee, the bottleneck.

Front door: `profile.py`.
"""
