"""Decoders of the CUDA backend for tests: on a GPU, or in Triton's interpreter on the CPU."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foreword.backends.choice import BackendChoice
from foreword.backends.interface import Decoder
from foreword.backends.torch.kv_store import TorchKvStore
from foreword.kv.spec import PageSpec, RowSpec
from foreword.models.formats.checkpoint import open_checkpoint

CUDA_DTYPES = ["bfloat16", "float32", "fp8", "fp8-kv"]


has_gpu = torch.cuda.is_available()
if not has_gpu:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

    if find_spec("triton") is not None:
        from helpers.interpreter import prepare_interpreter

        prepare_interpreter()

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
needs_cuda = pytest.mark.skipif(not has_gpu or find_spec("triton") is None, reason="no CUDA GPU with Triton")
EAGER = "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ  # captures need memory that is cached
captures = has_gpu and not EAGER
KERNEL_DEVICE = torch.device("cuda" if has_gpu else "cpu")


def comparable_numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random numbers with which the bits of differently shaped sums may be compared.

    A GPU's kernels sum in one order, so these may be any numbers. The interpreter multiplies with NumPy, whose order
    depends on the shape and on the CPU: there they are multiples of 1/4 from -2 to 2. Their products are exact in
    float32, and so are sums of up to 2**18 of these in any order.
    """
    if has_gpu:
        return torch.randn(shape, device=KERNEL_DEVICE).to(dtype)
    return (torch.randint(-8, 9, shape) / 4).to(dtype)


def assert_same_row(found: Tensor, expected: Tensor) -> None:
    """Compare results of a whole model: bit by bit on a GPU, within rounding where NumPy chooses the order of sums."""
    if has_gpu:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def assert_same_sums(found: Tensor, expected: Tensor) -> None:
    """Compare sums of products: bit by bit on a GPU, within float32's rounding where NumPy chooses their order.

    What cancels in a sum has rounded as its largest terms have, so the bound is a share of the largest result.
    """
    if has_gpu:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, atol=float(expected.abs().max()) * 2**-20, rtol=0)


def cuda_decoder(
    path: Path, dtype: str = "float32", *, enforce_eager: bool = EAGER, heads: str = "auto"
) -> Decoder:
    """On a GPU as it is used; on the CPU its kernels are interpreted, which is slow and right in float32 alone.

    Products come in parts as they do in large models. With "fp8", weights are in 8 bits and the rest as usual;
    with "fp8-float32", the rest is float32; with "fp8-kv", keys and values are in 8 bits. `heads`: their quantization.
    """
    from foreword.backends.cuda.decoder import CudaDecoder
    from foreword.backends.cuda.packing import load_packed
    from foreword.backends.cuda.products import Products

    checkpoint = open_checkpoint(path)
    usual = torch.bfloat16 if has_gpu else torch.float32
    numbers = {"fp8": usual, "fp8-kv": usual, "fp8-float32": torch.float32}.get(dtype) or getattr(
        torch, dtype
    )
    quantization = "fp8" if dtype in ("fp8", "fp8-float32") else "none"
    choice = BackendChoice("cuda", None, numbers, "", quantization)
    weights = load_packed(checkpoint, choice, KERNEL_DEVICE)
    made = CudaDecoder(
        checkpoint.config,
        weights,
        Products(least_part=16),
        enforce_eager=enforce_eager,
        packs_kv=dtype == "fp8-kv",
        quantization=heads,
    )
    if made.kernels is not None:
        made.kernels.are_awaited = True
    return made


def packed_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """KV rows [slots, kv heads, dim] in 8 bits as the kernels keep them, and the numbers that they then stand for."""
    slots, heads, dim = rows.shape
    scales = rows.float().abs().amax(-1, keepdim=True) / 448
    values = (rows.float() / scales).to(torch.float8_e4m3fn)
    pairs = torch.stack(values.view(torch.uint8).chunk(2, dim=-1), dim=-1)
    parts = [part.reshape(slots, -1).view(torch.uint8) for part in (pairs, scales.contiguous())]
    spec = RowSpec("rows", 1, heads, dim, packed=True)
    memory = TorchKvStore(PageSpec(spec), slots, 1, rows.device).arrays("rows")[0][0, :slots]
    memory[:] = torch.cat(parts, dim=1).view(slots, heads, dim + 4)
    return memory, values.float() * scales
