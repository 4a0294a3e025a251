"""Sources of models: built-in names, paths, and the hub."""
