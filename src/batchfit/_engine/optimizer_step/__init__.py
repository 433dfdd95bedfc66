"""An optimizer step that is taken as a whole or not at all.

Front door: `step.py`.
"""
