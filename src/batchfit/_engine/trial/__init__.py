"""One measured attempt at a batch size, in this process or in a child.

Front door: `trial.py`. `in_process.py` and `in_children.py` run trials; `child_main.py` is the child.
"""
