"""Measurements: one command, ``python -m bench``, prints every figure that the project claims."""
