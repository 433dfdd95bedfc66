"""What is decided about a program without running it: its command, its environment, how it ended."""
