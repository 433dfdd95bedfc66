"""Measuring: the only place below the verbs that touches torch and a device."""
