"""One decoder on several ranks: every rank has a share of each layer, and the first one draws."""
