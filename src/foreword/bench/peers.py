"""Engines of `foreword bench compare`, each in its own process with JSON lines as input and output.

The process is started as `python -m foreword.bench.peers PATH MODEL MODE THREADS DEVICE [DRAFT]`; PATH is
`module:class` of the engine. Output that an engine prints goes to standard error. Each class imports its engine itself,
because its environment may lack the other engines and torch.
"""

import importlib
import json
import os
import resource
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import count as numbers
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import IO, Any, Protocol

LOOKUP_TOKENS = 10  # draft tokens of prompt lookup, as documented by llama-cpp-python and transformers
VLLM_DRAFT_TOKENS = 5
CPU = "cpu"


class PeerEngine(Protocol):
    """A loaded model that answers greedily, one request at a time."""

    def tokens(self, prompt: Sequence[int], count: int) -> Iterator[Sequence[int]]:
        """Yield exactly `count` tokens after the prompt in all, as they arrive; keep no state for later prompts."""


class Ours:
    """Foreword. Its mode is `plain`, `auto` or a drafter's name; `draft` is the path of a draft model."""

    def __init__(self, model: str, mode: str, threads: int, device: str, draft: str | None = None) -> None:
        from foreword.drafters.names import named_methods
        from foreword.engine.llm import LLM

        named = {"method": mode, "model": draft} if draft else named_methods(mode)
        speculation = {"plain": "off", "auto": "auto"}.get(mode) or {**named, "fixed": True}
        self._llm = LLM(model, speculation=speculation, device=device)
        self._numbers = numbers()

    def tokens(self, prompt: Sequence[int], count: int) -> Iterator[Sequence[int]]:
        """Yield the tokens of every step. Each answer has a tenant of its own, whose prefix cache is empty."""
        from foreword.acceptance.params import SamplingParams
        from foreword.engine.messages import NewRequest

        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        engine, tenant = self._llm.engine, f"answer {next(self._numbers)}"
        (request,) = engine.add(NewRequest("compare", tuple(prompt), params, tenant))
        done = len(request.tokens)
        while request.finish_reason is None:
            engine.step()
            if len(request.tokens) > done:
                yield request.tokens[done:]
                done = len(request.tokens)


class Portions:
    """A streamer for `generate` of transformers, which queues the tokens it receives, the prompt first."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[list[int] | None] = SimpleQueue()  # None: the answer has ended

    def put(self, value: Any) -> None:  # noqa: ANN401 - a tensor
        self.queue.put(value.reshape(-1).tolist())

    def end(self) -> None:
        self.queue.put(None)


class Transformers:
    """transformers: `plain`, `prompt lookup`, or `assisted` by a draft model.

    Weights are float32 on a CPU and bfloat16 on a GPU, as Foreword's.
    """

    def __init__(self, model: str, mode: str, threads: int, device: str, draft: str | None = None) -> None:
        import torch

        torch.set_num_threads(threads)
        self._device = device
        self._model = self._loaded(model)
        self._extra: dict[str, Any] = {}
        if mode == "prompt lookup":
            self._extra = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        elif draft is not None:
            self._extra = {"assistant_model": self._loaded(draft)}

    def _loaded(self, model: str) -> Any:  # noqa: ANN401 - transformers' own
        import torch
        from transformers import AutoModelForCausalLM

        path = Path(model)
        source = {"pretrained_model_name_or_path": model}
        if path.is_file():
            source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        dtype = torch.float32 if self._device == CPU else torch.bfloat16
        loaded: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype)
        return loaded.to(self._device)

    def tokens(self, prompt: Sequence[int], count: int) -> Iterator[Sequence[int]]:
        """Yield tokens while `generate` runs in a thread, since it returns only at the end."""
        import torch

        inputs, portions = torch.tensor([list(prompt)], device=self._device), Portions()
        arguments = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **self._extra}
        mask = torch.ones_like(inputs)

        def run() -> None:
            try:
                self._model.generate(
                    inputs, attention_mask=mask, max_new_tokens=count, streamer=portions, **arguments
                )
            finally:
                portions.end()

        thread = threading.Thread(target=run)
        thread.start()
        portions.queue.get()  # the prompt
        while (portion := portions.queue.get()) is not None:
            yield portion
        thread.join()


class Vllm:
    """vLLM without a server: `plain` or `ngram`.

    Answers arrive as a whole. So the prompt is answered twice: with one token, to time the first token, and in full.
    """

    def __init__(self, model: str, mode: str, threads: int, device: str) -> None:
        import vllm

        lookup = {"method": "ngram", "num_speculative_tokens": VLLM_DRAFT_TOKENS, "prompt_lookup_max": 4}
        self._llm: Any = vllm.LLM(
            model, speculative_config=lookup if mode == "ngram" else None, enable_prefix_caching=False
        )

    def tokens(self, prompt: Sequence[int], count: int) -> Iterator[Sequence[int]]:
        import vllm

        for length in (1, count):
            params = vllm.SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            (output,) = self._llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
            yield list(output.outputs[0].token_ids)[0 if length == 1 else 1 :]


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process, from /proc because getrusage inherits the parent's value."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")


def main() -> None:
    """Load the engine of the command line, report that it is ready, then answer one request per line of input."""
    path, model, mode, threads, device, *draft = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        module, _, name = path.partition(":")
        engine = getattr(importlib.import_module(module), name)(model, mode, int(threads), device, *draft)
    except Exception as error:  # any exception of an engine
        _report(out, {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
        return
    _report(out, {"ready": True})
    for line in sys.stdin:
        wanted = json.loads(line)
        _report(out, _timed_answer(engine, wanted["prompt"], wanted["count"]))


def _timed_answer(engine: PeerEngine, prompt: list[int], count: int) -> dict[str, Any]:
    """Return an answer as JSON: its tokens, its times in seconds, and the peak memory of this process."""
    began = perf_counter()
    first: float | None = None
    first_tokens = 0
    tokens: list[int] = []
    for portion in engine.tokens(prompt, count):
        tokens += portion
        if first is None and tokens:
            first, first_tokens = perf_counter() - began, len(tokens)
    return {
        "tokens": tokens,
        "first_seconds": first or 0.0,
        "first_tokens": first_tokens,
        "seconds": perf_counter() - began,
        "peak_bytes": peak_resident_bytes(),
    }


def _report(out: IO[str], value: dict[str, Any]) -> None:
    print(json.dumps(value), file=out, flush=True)


if __name__ == "__main__":
    main()
