"""Policies: which drafter each request uses, how deep, and roll-outs."""
