"""Triton kernels; tests compare each with the torch decoder."""
