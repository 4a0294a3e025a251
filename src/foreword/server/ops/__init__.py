"""What operators need: admission, keys, metrics, health."""
