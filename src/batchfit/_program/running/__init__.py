"""`batchfit run`: the program's real training run, at the size that was found. Begin at `real_run.py`."""
