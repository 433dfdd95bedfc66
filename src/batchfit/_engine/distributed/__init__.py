"""Process groups: agreement between ranks, collectives that are counted, ranks that are lost."""
