"""A request: its answer, sampler state, assignment and accounting."""
