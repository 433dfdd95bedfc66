"""The search as an immutable value: settings and history in, the next size out."""
