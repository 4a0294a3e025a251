"""What is decided for a pass: whom to ask, how deep, and which of the guesses to verify."""
