"""Commands for several processes and machines."""
