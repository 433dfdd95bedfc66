"""`batchfit sweep`: its command, its file, its flags and its screen. Front door: `sweep.py`."""
