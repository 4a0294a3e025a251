"""Triton kernels; each is compared with the torch decoder's way of computing the same."""
