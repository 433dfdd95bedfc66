"""`batchfit.Microbatcher`: a batch in microbatches that fit, with exact gradients.

Front door: `microbatcher.py`.
"""
