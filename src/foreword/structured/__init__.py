"""Structured output: request parameters, compiled grammars, and the parser state of an answer."""
