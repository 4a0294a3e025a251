"""llama.cpp, through llama-cpp-python: for `foreword bench compare` and `foreword bench step`."""

import ctypes
import importlib
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

from foreword.bench.peers import CPU, LOOKUP_TOKENS
from foreword.errors import ForewordError, RequestError

FILE_TYPES = {"Q8_0": 7, "Q4_0": 2}  # formats of llama.cpp to measure, with its numbers for them
CACHE = "FOREWORD_COMPARE_CACHE"  # environment variable with the folder for files that llama.cpp writes
CONTEXT = 4096


class LlamaCpp:
    """A model in llama.cpp, for `bench compare`.

    Its mode is "stored" (the file as it is) or a format to which llama.cpp quantises the file. A mode such as
    "stored lookup" also uses the prompt lookup of llama-cpp-python.
    """

    def __init__(self, model: str, mode: str, threads: int, device: str) -> None:
        form, _, lookup = mode.partition(" ")  # `form`: "stored" or a key of `FILE_TYPES`
        library = load_llama_cpp()
        if device != CPU and not library.llama_supports_gpu_offload():
            raise RequestError(
                "this build has no GPU support; build llama-cpp-python with CMAKE_ARGS=-DGGML_CUDA=on"
            )
        path = model if form == "stored" else quantized_copy(Path(model), Path(os.environ[CACHE]), form)
        extra: dict[str, Any] = {}
        if lookup:
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            draft_model = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)
            extra = {"draft_model": draft_model, "logits_all": True}
        self._llama = library.Llama(
            str(path),
            n_ctx=CONTEXT,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=0 if device == CPU else -1,
            verbose=False,
            **extra,
        )

    def tokens(self, prompt: Sequence[int], count: int) -> Iterator[Sequence[int]]:
        self._llama.reset()
        for token in islice(self._llama.generate(list(prompt), temp=0.0, reset=False), count):
            yield [token]


class LlamaCppTimer:
    """Times llama.cpp's passes for `foreword bench step`, over the same tokens as Foreword's."""

    def __init__(self, path: Path, context: int, most_tokens: int, threads: int) -> None:
        from foreword.bench.step_cost import random_tokens  # torch may be missing where `LlamaCpp` runs

        self._library = library = load_llama_cpp()
        self._model = library.llama_model_load_from_file(
            str(path).encode(), library.llama_model_default_params()
        )
        if not self._model:
            raise LlamaCppError(f"llama.cpp cannot load {path}; delete it and try again")
        settings = library.llama_context_default_params()
        settings.n_ctx = context + most_tokens + 64  # some spare positions
        settings.n_batch = settings.n_ubatch = max(context, most_tokens, 512)
        settings.n_threads = settings.n_threads_batch = threads
        self._context = library.llama_init_from_model(self._model, settings)
        self._batch = library.llama_batch_init(settings.n_batch, 0, 1)
        vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        self._tokens = random_tokens(max(context, most_tokens), vocab)
        self._length = context - 1  # the newest committed token is part of every step
        if self._length:
            self._decode(self._tokens[: self._length], 0, all_logits=False)

    def step(self, n: int) -> float:
        """Return the seconds of a pass that verifies: the newest token and `n` - 1 draft tokens."""
        newest = self._tokens[self._length : self._length + 1]
        return self._timed(newest + self._tokens[: n - 1], self._length, all_logits=True)

    def prefill(self, count: int) -> float:
        """Return the seconds of a prompt of `count` tokens; compute the KV rows of the context again afterwards."""
        self._cut(0)
        seconds = self._timed(self._tokens[:count], 0, all_logits=False)
        self._decode(self._tokens[: self._length], 0, all_logits=False)
        return seconds

    def _timed(self, tokens: list[int], start: int, all_logits: bool) -> float:
        """Return the seconds of a pass, whose KV rows are then removed."""
        began = perf_counter()
        self._decode(tokens, start, all_logits)
        seconds = perf_counter() - began
        self._cut(start)
        return seconds

    def _cut(self, length: int) -> None:
        """Remove all KV rows after the first `length`."""
        self._library.llama_memory_seq_rm(self._library.llama_get_memory(self._context), 0, length, -1)

    def _decode(self, tokens: list[int], start: int, all_logits: bool) -> None:
        """Run a pass over tokens at positions from `start` on, with logits of all of them or of the last one."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, start + i, 1, 0
            batch.logits[i] = all_logits or i == len(tokens) - 1
        if self._library.llama_decode(self._context, batch):
            raise LlamaCppError("llama.cpp refused a pass; try a shorter --context")


# Discards log lines. A module variable, because llama.cpp keeps the pointer.
_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)


class LlamaCppError(ForewordError):
    """llama.cpp refused a file or a pass."""


def load_llama_cpp() -> Any:  # noqa: ANN401
    """Return llama-cpp-python's bindings, silenced; raise `RequestError` if not installed."""
    try:
        library = importlib.import_module("llama_cpp")
    except ImportError as error:
        raise RequestError(
            "--compare llama.cpp needs llama-cpp-python: pip install 'foreword[compare]' (compiles for minutes)"
        ) from error
    library.llama_log_set(_SILENT, ctypes.c_void_p(0))
    library.llama_backend_init()
    return library


def quantized_copy(source: Path, directory: Path, kind: str) -> Path:
    """Return the model in the format `kind` (a key of `FILE_TYPES`), which llama.cpp writes into `directory` once."""
    library = load_llama_cpp()
    target = directory / f"{source.stem}.{kind}.gguf"
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    settings = library.llama_model_quantize_default_params()
    settings.ftype = FILE_TYPES[kind]
    settings.allow_requantize = True
    unfinished = target.with_suffix(".part")
    if library.llama_model_quantize(str(source).encode(), str(unfinished).encode(), ctypes.byref(settings)):
        raise LlamaCppError(f"llama.cpp cannot write {source} as {kind}; give a .gguf file that it can read")
    return unfinished.rename(target)
