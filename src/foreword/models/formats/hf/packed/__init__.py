"""Quantised weights as people publish them in safetensors: one file per scheme, all unpacked at load."""
