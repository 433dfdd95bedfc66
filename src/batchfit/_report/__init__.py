"""_report."""
