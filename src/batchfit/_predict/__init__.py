"""_predict."""
