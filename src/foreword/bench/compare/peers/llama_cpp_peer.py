"""llama.cpp through llama-cpp-python."""

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from foreword.bench.costs.llama_cpp import load_llama_cpp, quantized_copy

CACHE = "FOREWORD_COMPARE_CACHE"
"""Variable with the folder for files that llama.cpp makes; set by the process that compares."""
CONTEXT = 4096
LOOKUP_TOKENS = 10  # the number in llama-cpp-python's own documentation


class LlamaCpp:
    """A format that llama.cpp makes itself (`Q8_0`, `Q4_0`), alone or with `lookup`, its prompt lookup."""

    def __init__(self, model: str, mode: str, threads: int) -> None:
        kind, _, lookup = mode.partition(" ")
        library = load_llama_cpp()
        path = quantized_copy(Path(model), Path(os.environ[CACHE]), kind)
        extra: dict[str, Any] = {}
        if lookup:
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            extra = {
                "draft_model": LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS),
                "logits_all": True,
            }
        self._llama = library.Llama(
            str(path), n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, verbose=False, **extra
        )

    def tokens(self, prompt: Sequence[int], count: int) -> Iterator[Sequence[int]]:
        self._llama.reset()
        for token in islice(self._llama.generate(list(prompt), temp=0.0, reset=False), count):
            yield [token]
