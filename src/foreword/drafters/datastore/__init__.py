"""Texts to look continuations up in: one file, mapped into memory, with its suffixes in order."""
