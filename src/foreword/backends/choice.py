"""Selects a model's backend and number format."""

import logging
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch

from foreword.backends.cpu.packing import FORMATS, WeightFormat
from foreword.errors import RequestError
from foreword.kernels.native import native_status

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Number formats of the torch backend."""

CPU_DTYPES = ("int8", "stored", "q4", "q8_0", "float32")
"""Number formats of the CPU kernels. `auto` selects one of the first two."""

BACKENDS = ("auto", "cpu", "cuda", "torch")

QUANTIZATIONS = {"auto": "", "none": "", "fp8": "cuda", "int4": "cuda"}
"""Weight formats, and the backend that each of them needs (empty: any).

`auto` keeps weights as they are stored, `none` unpacks them, `fp8` and `int4` round them to 8 or 4 bits.
"""

KV_DTYPES = {"auto": "", "float32": "cpu", "bfloat16": "cpu", "int8": "cpu", "fp8": "cuda"}
"""Number formats of keys and values, and the backend that each of them needs (empty: any).

`auto` is the backend's default. `int8` are 8-bit integers, `fp8` 8-bit floats; both have a scale per token and head.
"""


@dataclass(frozen=True)
class BackendChoice:
    """The backend and number format to load a decoder with."""

    name: str  # as in `--backend`
    form: WeightFormat | None  # number formats of the CPU kernels; None on other backends
    torch_dtype: torch.dtype  # dtype of the torch and CUDA decoders
    reason: str  # why this backend was selected
    quantization: str = "auto"  # see QUANTIZATIONS
    kv_cache_dtype: str = "auto"  # see KV_DTYPES


def choose_backend(
    backend: str, dtype: str, device: torch.device, quantization: str = "auto", kv_cache_dtype: str = "auto"
) -> BackendChoice:
    """Select backend and number formats; raise `RequestError` for unsupported combinations."""
    choice = _choose(backend, dtype, device)
    for option, value, backends_by_value in (
        ("quantization", quantization, QUANTIZATIONS),
        ("kv_cache_dtype", kv_cache_dtype, KV_DTYPES),
    ):
        if value not in backends_by_value:
            raise RequestError(f"unknown {option} {value!r}; use {', '.join(backends_by_value)}")
        if backends_by_value[value] not in ("", choice.name):
            flag = f"--{option.replace('_', '-')}"
            raise RequestError(
                f"{option} {value} needs the {backends_by_value[value]} backend, not {choice.name}; leave out {flag}"
            )
    form = choice.form
    if form is not None and kv_cache_dtype != "auto":
        form = replace(form, kv_dtype=kv_cache_dtype)
    return replace(choice, form=form, quantization=quantization, kv_cache_dtype=kv_cache_dtype)


def _choose(backend: str, dtype: str, device: torch.device) -> BackendChoice:
    """Select CPU kernels on a CPU, and Triton kernels on a GPU, if they are available; otherwise torch.

    `float32` on a CPU uses torch, the reference, unless the CPU kernels are requested.
    """
    if backend == "native":
        raise RequestError("the backend on the compiled CPU kernels is named cpu; use --backend cpu")
    if backend not in BACKENDS:
        raise RequestError(f"unknown backend {backend!r}; use {', '.join(BACKENDS)}")
    if dtype != "auto" and dtype not in DTYPES and dtype not in CPU_DTYPES:
        names = ", ".join(dict.fromkeys(("auto", *DTYPES, *CPU_DTYPES)))
        raise RequestError(f"unknown dtype {dtype!r}; use one of {names}")
    if backend == "cuda" or (backend == "auto" and device.type == "cuda"):
        return _on_gpu(backend, dtype, device)
    refusal = _reason_against_cpu(dtype, device)
    needs_cpu_kernels = dtype in CPU_DTYPES and dtype not in DTYPES
    if backend == "cpu" or needs_cpu_kernels:
        if backend == "torch":
            raise RequestError(f"dtype {dtype} needs the CPU kernels; leave out --backend torch")
        if refusal:
            raise RequestError(f"the CPU kernels cannot be used: {refusal}")
        return _cpu(dtype, "asked for")
    if backend == "torch" or dtype in DTYPES:
        return _torch(dtype, device, "asked for")
    if refusal:
        if device.type == "cpu":
            logging.getLogger("foreword").warning(
                "foreword runs on torch, not on its CPU kernels: %s", refusal
            )
        return _torch(dtype, device, refusal)
    return _cpu(dtype, "the fastest on this CPU")


def parallel_backend(backend: str, ranks: int) -> str:
    """Return the backend for this many ranks: torch if there are several."""
    if ranks == 1 or backend == "torch":
        return backend
    if backend != "auto":
        raise RequestError(
            f"tensor_parallel_size {ranks} needs the torch backend; leave out --backend {backend}"
        )
    return "torch"


def _reason_against_cpu(dtype: str, device: torch.device) -> str:
    """Return why the CPU kernels cannot be used; empty if they can."""
    if device.type != "cpu":
        return f"the model is on {device.type}"
    if dtype in ("bfloat16", "float16"):
        return f"they do not compute in {dtype}"
    return native_status().reason


def _on_gpu(backend: str, dtype: str, device: torch.device) -> BackendChoice:
    """Select Triton kernels if they can run; otherwise torch, unless they were requested by name."""
    if dtype != "auto" and dtype not in DTYPES:
        raise RequestError(
            f"dtype {dtype} needs the CPU kernels; use --device cpu, or one of {', '.join(DTYPES)}"
        )
    if device.type != "cuda":
        raise RequestError("--backend cuda needs a CUDA GPU; use --backend cpu or torch")
    torch_dtype = torch.bfloat16 if dtype == "auto" else DTYPES[dtype]
    missing = _missing_triton()
    if missing:
        if backend == "cuda":
            raise RequestError(f"--backend cuda cannot be used: {missing}; pip install -U triton")
        return BackendChoice("torch", None, torch_dtype, missing)
    return BackendChoice(
        "cuda", None, torch_dtype, "asked for" if backend == "cuda" else "the fastest on this GPU"
    )


def _missing_triton() -> str:
    """Return why Triton kernels cannot be compiled; empty if they can."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    return "" if find_spec("triton.tools.tensor_descriptor") is not None else "Triton is older than 3.4"


def _cpu(dtype: str, reason: str) -> BackendChoice:
    return BackendChoice("cpu", FORMATS[dtype], torch.float32, reason)


def _torch(dtype: str, device: torch.device, reason: str) -> BackendChoice:
    default = torch.bfloat16 if device.type == "cuda" else torch.float32
    return BackendChoice("torch", None, DTYPES.get(dtype, default), reason)


def pick_device(device: str) -> torch.device:
    """Return the device of this name; `auto`: the first CUDA device, or the CPU if there is none."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen_device = torch.device(device)
    except RuntimeError as error:
        raise RequestError(f"unknown device {device!r}; use auto, cpu or cuda") from error
    if chosen_device.type not in ("cpu", "cuda"):
        raise RequestError(f"device {device!r} is not supported; use auto, cpu or cuda")
    if chosen_device.type == "cuda" and not torch.cuda.is_available():
        raise RequestError(f"device {device!r} was asked for, but torch sees no CUDA GPU; use cpu")
    return chosen_device
