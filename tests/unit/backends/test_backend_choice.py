"""Which backend and which numbers are used, and what is said when the CPU kernels are missing."""

import logging

import pytest
import torch

from foreword.backends import choice as module
from foreword.backends.choice import choose_backend
from foreword.errors import RequestError
from foreword.kernels.native import NativeStatus, choose_isa, choose_threads
from helpers.cpu import needs_cpu_kernels

CPU = torch.device("cpu")
MISSING = NativeStatus(False, "not built", ())


@needs_cpu_kernels
def test_auto_on_the_cpu_is_native():
    choice = choose_backend("auto", "auto", CPU)
    assert choice.form is not None
    assert choice.form.name == "auto"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_torch_numbers_stay_with_torch(dtype: str):
    assert choose_backend("auto", dtype, CPU).form is None


@needs_cpu_kernels
def test_float32_on_the_kernels_must_be_asked_for():
    choice = choose_backend("cpu", "float32", CPU)
    assert choice.form is not None
    assert choice.form.is_float32


@pytest.mark.parametrize(("triton", "expected"), [(True, "cuda"), (False, "torch")])
def test_a_gpu_computes_in_bfloat16_with_triton_where_it_is(
    triton: bool, expected: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "find_spec", lambda name: triton or None)
    choice = choose_backend("auto", "auto", torch.device("cuda"))
    assert (choice.name, choice.form, choice.torch_dtype) == (expected, None, torch.bfloat16)
    assert choice.reason == ("the fastest on this GPU" if triton else "Triton is not installed")
    assert choose_backend("torch", "auto", torch.device("cuda")).name == "torch"


@needs_cpu_kernels
@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "expected"),
    [
        ("auto", "auto", "bfloat16"),
        ("stored", "auto", "bfloat16"),
        ("float32", "auto", "float32"),
        ("int8", "float32", "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("auto", "int8", "int8"),
    ],
)
def test_keys_and_values_of_the_cpu_kernels(dtype: str, kv_cache_dtype: str, expected: str):
    form = choose_backend("cpu", dtype, CPU, kv_cache_dtype=kv_cache_dtype).form
    assert form is not None
    assert form.kv_dtype == expected


def test_weights_in_8_bits_need_the_cuda_backend(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "find_spec", lambda name: True)
    assert choose_backend("auto", "auto", torch.device("cuda"), "fp8").quantization == "fp8"
    for backend, device in (("torch", "cuda"), ("auto", "cpu")):
        with pytest.raises(RequestError, match="fp8 needs the cuda backend"):
            choose_backend(backend, "auto", torch.device(device), "fp8")
    assert choose_backend("auto", "auto", torch.device("cuda"), kv_cache_dtype="fp8").kv_cache_dtype == "fp8"
    with pytest.raises(
        RequestError, match=r"kv_cache_dtype fp8 needs the cuda backend.*leave out --kv-cache-dtype"
    ):
        choose_backend("torch", "auto", torch.device("cuda"), kv_cache_dtype="fp8")
    with pytest.raises(RequestError, match="bfloat16 needs the cpu backend, not cuda"):
        choose_backend("auto", "auto", torch.device("cuda"), kv_cache_dtype="bfloat16")
    with pytest.raises(RequestError, match="unknown quantization 'int3'"):
        choose_backend("auto", "auto", CPU, "int3")


def test_the_cuda_backend_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(RequestError, match="needs a CUDA GPU"):
        choose_backend("cuda", "auto", CPU)
    with pytest.raises(RequestError, match="int8 needs the CPU kernels"):
        choose_backend("cuda", "int8", torch.device("cuda"))
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match="Triton is not installed; pip install"):
        choose_backend("cuda", "auto", torch.device("cuda"))
    monkeypatch.setattr(module, "find_spec", lambda name: name == "triton" or None)
    with pytest.raises(RequestError, match=r"Triton is older than 3\.4; pip install"):
        choose_backend("cuda", "auto", torch.device("cuda"))


def test_without_kernels_torch_runs_and_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(module, "native_status", lambda: MISSING)
    with caplog.at_level(logging.WARNING):
        choice = choose_backend("auto", "auto", CPU)
    assert choice.form is None
    assert [record.getMessage().count("\n") for record in caplog.records] == [0]
    with pytest.raises(RequestError, match="not built"):
        choose_backend("cpu", "auto", CPU)
    with pytest.raises(RequestError, match="not built"):
        choose_backend("auto", "int8", CPU)


@pytest.mark.parametrize(("backend", "dtype"), [("gpu", "auto"), ("auto", "int7"), ("torch", "int8")])
def test_contradictions_are_refused(backend: str, dtype: str):
    with pytest.raises(RequestError):
        choose_backend(backend, dtype, CPU)


def test_instruction_set_and_threads_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FOREWORD_ISA", raising=False)
    assert choose_isa(("fast", "slow")) == "fast"
    monkeypatch.setenv("FOREWORD_ISA", "slow")
    assert choose_isa(("fast", "slow")) == "slow"
    with pytest.raises(RequestError, match="slow"):
        choose_isa(("fast",))
    monkeypatch.setenv("FOREWORD_THREADS", "3")
    assert choose_threads() == 3
    assert choose_threads(5) == 5
    for bad in ("0", "many", "-1"):
        monkeypatch.setenv("FOREWORD_THREADS", bad)
        with pytest.raises(RequestError):
            choose_threads()


def test_the_old_name_of_the_cpu_kernels_is_refused_with_the_new_one():
    with pytest.raises(RequestError, match="--backend cpu"):
        choose_backend("native", "auto", CPU)


@needs_cpu_kernels
def test_a_choice_has_the_name_that_it_is_asked_for_by():
    assert [choose_backend(name, "float32", CPU).name for name in ("cpu", "torch")] == ["cpu", "torch"]
