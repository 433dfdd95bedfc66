"""`batchfit init`: what to add to a program, found by reading its source.

Pure. Front door: `advice.py`.
"""
