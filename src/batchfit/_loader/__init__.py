"""_loader."""
