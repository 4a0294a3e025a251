"""A cluster of targets and draft nodes on a clock of its own: what a fleet would do, before it is paid for."""
