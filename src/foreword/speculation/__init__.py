"""The decoding step, a transaction over requests and KV rows. Start with `step.py`."""
