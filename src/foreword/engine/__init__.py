"""Assembles model, KV cache, scheduler, drafters and policy into an engine."""
