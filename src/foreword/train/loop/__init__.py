"""The training loop: steps, evaluation, saved states and output."""
