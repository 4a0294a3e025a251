"""Datastore of texts for retrieval: a memory-mapped file with sorted suffixes."""
