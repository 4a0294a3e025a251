"""Tensor parallelism: every rank has a share of each layer, and the first one samples."""
