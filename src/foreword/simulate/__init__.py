"""Discrete-event simulation of targets and draft nodes."""
