"""From logits to distributions to verdicts."""
