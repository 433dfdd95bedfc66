"""Any program, with no line changed: `find -- python train.py --batch-size {}`.

Front doors: `find.py`, `profile.py`, `sweep.py`, `tracing/predict.py`, `tracing/explain.py` and
`running/real_run.py`, each named after its verb. `trials.py` runs the command in child processes:
`followed_run.py` listens to one, `run_verdict.py` judges it. `probe/` is what is put into each Python of it,
and `guardian.py` ends them.
"""
