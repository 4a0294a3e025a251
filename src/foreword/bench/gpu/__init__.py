"""What a GPU could do, and how much of it a decoder gets."""
