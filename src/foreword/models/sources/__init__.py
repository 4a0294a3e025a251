"""Where a model comes from: built in, a path, a hub."""
