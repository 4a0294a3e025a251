"""The training loop: steps, measurements, states on disk, what is left at the end."""
