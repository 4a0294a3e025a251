"""HTTP routes for clients: OpenAI-compatible ones and our own."""
