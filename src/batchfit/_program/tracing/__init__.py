"""A program traced as it runs on a CPU: predictions and explanations of a command (`traces.py`)."""
