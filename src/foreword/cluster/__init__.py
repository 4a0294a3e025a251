"""Draft nodes: remote drafters, and the target's side of them."""
