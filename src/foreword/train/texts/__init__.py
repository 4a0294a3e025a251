"""The texts that are trained on: written by the target itself, kept in shards."""
