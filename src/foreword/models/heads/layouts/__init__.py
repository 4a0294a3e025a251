"""Published layouts of heads, one file each."""
