"""The backend on the compiled CPU kernels."""
