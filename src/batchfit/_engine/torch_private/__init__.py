"""What batchfit reaches of torch that is private, all of it: names that a version may lack, move or rename.

Each module asks whether a name is there; who calls for a missing one gets a poorer answer that is stated, or
a refusal with torch's version and what to do. `needs.py` is the table of what each feature needs.
"""
