"""Packed matrices of random numbers, and their products."""

import importlib

import gguf
import numpy as np
import torch

from foreword.backends.cpu.packing import BLOCK_KINDS
from helpers.cpu import STATUS

arena = importlib.import_module("foreword.kernels._native").Arena() if STATUS.available else None


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers with a few large ones, as activations have."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.02, values * 30, values)


def product(matrix, x: torch.Tensor, isa: str) -> torch.Tensor:
    out = torch.empty(len(x), matrix.rows)
    matrix.multiply(x, out, isa)
    return out


def random_blocks(kind: str, rows: int, columns: int) -> np.ndarray:
    """Blocks in which every bit is used; their half-precision numbers are small."""
    is_ours = kind == "Q4_Z"
    columns_each, size = (32, 19) if is_ours else gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = np.random.default_rng(columns)
    blocks = generator.integers(0, 256, (rows, columns // columns_each, size), np.uint8)
    for place in BLOCK_KINDS[kind]:
        halves = generator.normal(0, 0.01, blocks.shape[:2]).astype(np.float16)
        blocks[..., place : place + 2] = halves[..., None].view(np.uint8)
    if is_ours:
        blocks[..., 2] %= 17  # GPTQ's zeros reach 16
    return blocks.reshape(rows, -1)
