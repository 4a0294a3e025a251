"""transformers on the CPU or whatever torch has."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from transformers import AutoModelForCausalLM

LOOKUP_TOKENS = 10  # the number in transformers' own documentation


class Portions:
    """A streamer that passes on what it is given; the first is the prompt."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[list[int] | None] = SimpleQueue()

    def put(self, value: torch.Tensor) -> None:
        self.queue.put(value.reshape(-1).tolist())

    def end(self) -> None:
        self.queue.put(None)


def _loaded(model: str) -> Any:  # noqa: ANN401 - transformers' own
    path = Path(model)
    source: dict[str, Any] = (
        {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        if path.is_file()
        else {"pretrained_model_name_or_path": model}
    )
    return AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)


class Transformers:
    """`plain`, `prompt lookup`, or `assisted` by a draft model."""

    def __init__(self, model: str, mode: str, threads: int, draft: str | None = None) -> None:
        torch.set_num_threads(threads)
        self._model = _loaded(model)
        self._extra: dict[str, Any] = {}
        if mode == "prompt lookup":
            self._extra = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        elif draft is not None:
            self._extra = {"assistant_model": _loaded(draft)}

    def tokens(self, prompt: Sequence[int], count: int) -> Iterator[Sequence[int]]:
        """From a thread, as `generate` gives nothing back before its end."""
        inputs, portions = torch.tensor([list(prompt)]), Portions()
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
