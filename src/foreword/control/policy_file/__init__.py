"""The operator's rules: which requests are guessed for, by whom, and how far."""
