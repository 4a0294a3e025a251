"""Model description, file formats, draft heads, tokenizers and sources."""
