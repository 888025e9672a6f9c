"""Executes a plan: storage, collectives and the agreement of the hosts."""
