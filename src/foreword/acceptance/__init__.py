"""Acceptance: from logits to distributions to verdicts."""
