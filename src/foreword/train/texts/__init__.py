"""Training texts, written by the target and stored in shards."""
