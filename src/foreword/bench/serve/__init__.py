"""Load test of a server with the OpenAI API: load generator and report."""
