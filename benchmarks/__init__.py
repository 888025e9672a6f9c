"""Measured restores: slow storage, several hosts, stock and planned in one run."""
