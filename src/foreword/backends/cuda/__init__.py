"""The backend for NVIDIA GPUs: Triton kernels in captured graphs."""
