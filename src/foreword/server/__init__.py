"""HTTP in front of the engine: OpenAI's API, metrics, limits, and a process of its own for the engine."""
