"""HTTP server: OpenAI-compatible API, metrics, limits, and an engine in its own process."""
