"""Ways to guess, one file each; none imports another."""
