"""The target's side: draft nodes as one more drafter."""
