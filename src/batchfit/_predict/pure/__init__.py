"""The options of a prediction, checked without torch."""
