"""What clients ask for: OpenAI-compatible routes and our own."""
