"""The idea: a step is a transaction. Read `step.py` first."""
