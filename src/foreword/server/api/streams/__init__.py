"""Answers while they grow."""
