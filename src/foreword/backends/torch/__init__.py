"""The reference backend in plain torch, on CPU and CUDA."""
