"""Runs drafters in the decoding loops of other engines, which pass token ids and receive a chain of draft tokens."""

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, cast

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.names import named_methods
from foreword.drafters.registry import DrafterResources, drafter_kinds
from foreword.errors import RequestError
from foreword.models.formats.checkpoint import Checkpoint, open_checkpoint
from foreword.speculation.draft import ROOT, Draft
from foreword.speculation.drafting import DraftRequest, DraftSource, DraftTask


@dataclass
class _Text:
    """The token ids of a request in progress."""

    request_id: int  # the drafter's id of the request
    tokens: list[int] = field(default_factory=list)  # prompt and answer
    prompt_len: int = 0  # number of prompt tokens


class TextDrafter:
    """Drafts for many texts (lists of token ids), each with a key.

    A text that does not continue the last one of its key begins a new request.
    """

    def __init__(
        self,
        speculation: str | Mapping[str, Any],
        vocab_size: int,
        model: str | None = None,
        num_speculative_tokens: int | None = None,
    ) -> None:
        """Create a drafter from names such as `suffix+ngram`, or from a configuration as JSON or mapping.

        `model` is the folder of the tokenizer, which some drafters need. `num_speculative_tokens` is the default of
        the configuration's field of this name.
        """
        settings = speculation
        if isinstance(settings, str):
            settings = json.loads(settings) if settings.lstrip().startswith("{") else named_methods(settings)
        default = {} if num_speculative_tokens is None else {"num_speculative_tokens": num_speculative_tokens}
        self.config = SpeculationConfig.parse({**default, **settings})
        usable = []  # drafters that need only tokens, and a tokenizer for their text files
        for name, kind in drafter_kinds().items():
            traits = kind.traits
            if traits.kind is DraftSource.LOOKUP and not traits.needs and not traits.follows:
                usable.append(name)
        for name in self.config.method:
            if name not in usable:
                raise RequestError(
                    f"speculation: {name} runs only in foreword's own engine; give one of {', '.join(usable)}"
                )
        self._drafter = self.config.build(_resources(vocab_size, model))
        if self._drafter.traits.needs:
            raise RequestError(
                "speculation: this method needs the target's hidden states, which other engines do not give; "
                "use another method"
            )
        sampler = RequestSampler(SamplingParams(temperature=0), TokenLimits(vocab_size), (), 0)
        self._sampling = sampler.drafting()
        self._texts: dict[Hashable, _Text] = {}
        self._numbers = count()

    def draft(self, key: Hashable, tokens: Sequence[int], most: int | None = None) -> list[int]:
        """Return draft tokens that continue the text, at most `most`; of a tree, the path of first children."""
        text, limit = self._extended(key, tokens), self.config.num_speculative_tokens
        if most is not None:
            limit = min(most, limit)
        if limit < 1:
            return []
        depth = limit if self.config.max_depth is None else min(limit, self.config.max_depth)
        (draft,) = self._drafter.propose([DraftTask(self._request(text), limit, depth)])
        return first_path(draft)[:limit]

    def forget(self, key: Hashable) -> None:
        """End the text of a key; suffix drafters add its answer to their index."""
        if (text := self._texts.pop(key, None)) is not None:
            self._drafter.forget(self._request(text))

    def _extended(self, key: Hashable, tokens: Sequence[int]) -> _Text:
        """Return the text of a key, extended to these tokens; a new text if they do not continue it."""
        text = self._texts.get(key)
        if text is None or list(tokens[: len(text.tokens)]) != text.tokens:
            self.forget(key)
            text = self._texts[key] = _Text(next(self._numbers), prompt_len=len(tokens))
        text.tokens.extend(int(token) for token in tokens[len(text.tokens) :])
        return text

    def _request(self, text: _Text) -> DraftRequest:
        return DraftRequest(text.request_id, text.tokens, self._sampling, text.prompt_len)


def first_path(draft: Draft) -> list[int]:
    """Return the tokens of the path of first children, which are the most likely ones."""
    path: list[int] = []
    node = ROOT
    for child, parent in enumerate(draft.parents):
        if parent == node:
            path.append(draft.tokens[child])
            node = child
    return path


def _resources(vocab_size: int, model: str | None) -> DrafterResources:
    """Return resources without a target; the checkpoint in the folder `model` is opened on first use."""

    @cache
    def checkpoint() -> Checkpoint:
        if model is None:
            raise RequestError(
                "speculation: datastores and `warm` texts need the target's tokenizer; give its folder as `model`"
            )
        return open_checkpoint(Path(model))

    class LazyCheckpoint:
        """Opens the checkpoint on first access."""

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a checkpoint has
            return getattr(checkpoint(), name)

    def encode(text: str) -> list[int]:
        return checkpoint().tokenizer().encode(text, add_special_tokens=False)

    def refuse(_: Checkpoint) -> NoReturn:
        raise RequestError("speculation: draft models run only in foreword's own engine; use another method")

    no_target: Any = None
    load = cast("Callable[[Checkpoint], Any]", refuse)
    return DrafterResources(no_target, cast("Checkpoint", LazyCheckpoint()), encode, load, vocab_size)
