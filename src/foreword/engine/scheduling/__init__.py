"""Selects the requests of the next pass by class, priority, share and deadline."""
