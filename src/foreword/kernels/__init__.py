"""Bindings of the compiled CPU kernels, Triton kernels and their recording; each kernel has a slow reference."""
