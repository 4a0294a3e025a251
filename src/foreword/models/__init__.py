"""One decoder for the llama family, its files, its tokenizer."""
