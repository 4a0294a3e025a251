"""The engine's drafters: default choice, pool, and saved estimates."""
