"""One engine per file; each is imported only in the process that runs it."""
