"""A workload traced with fake tensors: every allocation of a step, without running it.

Front door: `workload.py` (a workload at a few sizes gives a footprint); `trace.py` traces one step.
"""
