"""What `adapt` does with the trainers of TRL: batches of pairs, packed sequences, losses with several terms.

The front door is `cutting`: `open_batch` says how a trainer's batch is cut. Users call nothing here.
"""
