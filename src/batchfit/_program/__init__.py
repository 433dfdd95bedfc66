"""Any program, with no line changed: `find -- python train.py --batch-size {}`. Begin at `trials.py`.

The command runs in child processes; `probe/` is what is put into each Python of it, `guardian.py` ends them.
"""
