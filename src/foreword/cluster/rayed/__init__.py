"""Members placed, started and watched by Ray. No byte of a step goes through it."""
