"""Code that runs a model: one room per backend, behind one interface."""
