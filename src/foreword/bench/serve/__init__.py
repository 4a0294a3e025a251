"""Load for a server that speaks the OpenAI API, and what it made of it."""
