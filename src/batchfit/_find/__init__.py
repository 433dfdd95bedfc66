"""`batchfit.find_batch_size`: the largest batch size that fits and lasts.

Front door: `find.py`. `pure/search.py` proposes sizes, `driver.py` runs their trials.
"""
