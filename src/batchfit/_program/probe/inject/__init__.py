"""A folder for PYTHONPATH: Python imports its `sitecustomize` at start, before the program's first line."""
