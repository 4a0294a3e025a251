"""What can be trained: one file for each method."""
