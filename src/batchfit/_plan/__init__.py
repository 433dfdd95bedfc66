"""`batchfit.plan`: which settings fit on which GPU, before anybody rents one. Nothing is downloaded or run.

Front door: `plan.py`. Rows: `pure/settings.py` has those of a model, `_Given.rows` in `plan.py` those of a
workload. Columns: `pure/options.py`. A cell is made by `cells.py`, the table by `pure/table.py`.
"""
