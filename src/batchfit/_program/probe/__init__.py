"""The probe: what runs inside the program's own Python, in every rank. torch's import calls `start.py`."""
