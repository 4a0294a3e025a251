"""Drafters: one file per drafter or family, declared in one registry."""
