"""Process groups: agreement between ranks, collectives that are counted, ranks that are lost.

Front door: `ranks.py` (`Ranks.agree`). How one batch runs on all ranks is `data_parallel/`.
"""
