"""Bookkeeping of KV pages: allocation, sharing, prefix cache, row moves."""
