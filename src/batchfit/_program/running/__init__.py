"""The program run for real: `batchfit run`. Begin at `real_run.py`."""
