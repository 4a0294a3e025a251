"""Published layouts of heads, one file each, and what they share: names, norms, layer numbers, masks."""
