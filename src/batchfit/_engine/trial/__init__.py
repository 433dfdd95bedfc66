"""Trials: some measured steps at one batch size, after which the state is restored.

Front door: `trial.py`, over the guarded runner of steps (`guarded_steps.py`). Its `TrialRunner` is what a
search sees: `in_process.py`, or `in_children.py` with `child_main.py` in each child.
"""
