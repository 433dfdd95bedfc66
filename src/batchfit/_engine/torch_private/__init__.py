"""Every use of a private name of torch, which a version may lack, move or rename.

Each module asks whether a name is there; who calls for a missing one gets a poorer answer that is stated, or
a refusal with torch's version and what to do. `needs.py` is the table of what each feature needs.
"""
