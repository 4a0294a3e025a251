"""vLLM, offline."""

from collections.abc import Iterator, Sequence
from typing import Any

import vllm

GUESSES = 5


class Vllm:
    """`plain` or `ngram`. It gives an answer back whole: the first token is timed by an answer of one."""

    def __init__(self, model: str, mode: str, threads: int) -> None:
        lookup = {"method": "ngram", "num_speculative_tokens": GUESSES, "prompt_lookup_max": 4}
        self._llm: Any = vllm.LLM(
            model, speculative_config=lookup if mode == "ngram" else None, enable_prefix_caching=False
        )

    def tokens(self, prompt: Sequence[int], count: int) -> Iterator[Sequence[int]]:
        for length in (1, count):
            params = vllm.SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            (output,) = self._llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
            yield list(output.outputs[0].token_ids)[0 if length == 1 else 1 :]
