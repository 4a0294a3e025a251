"""What a stream's rhythm tells about its text."""
