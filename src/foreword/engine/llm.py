"""The library's front door."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.rules import Rule, check_exact
from foreword.control.fixed import FixedPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.engine.engine import Engine, EngineConfig
from foreword.engine.loader import LoadedModel, load_model
from foreword.engine.outputs import CompletionOutput, Logprob, RequestOutput, Timings
from foreword.engine.request import Request
from foreword.errors import RequestError
from foreword.models.builtin import DEFAULT_MODEL
from foreword.models.detokenizer import IncrementalDetokenizer
from foreword.models.tokenizer import Tokenizer
from foreword.models.weights import Progress
from foreword.speculation.protocols import Drafter

Prompt = str | Mapping[str, Sequence[int]]
"""Text, or `{"prompt_token_ids": [...]}` as in vLLM."""

Messages = Sequence[Mapping[str, str]]
"""A conversation: `[{"role": "user", "content": "..."}]`."""

OnText = Callable[[int, str], None]
"""Called with (index of the prompt, new text) as text becomes certain."""


class LLM:
    """Loads a model and answers prompts.

    >>> llm = LLM("smollm2-135m")
    >>> llm.generate("Why is the sky blue?", SamplingParams(temperature=0))[0].outputs[0].text
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        dtype: str = "auto",
        device: str = "auto",
        backend: str = "auto",
        speculation: str | Mapping[str, Any] | None = None,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Load `model`: a built-in name, a local path or a hub id; `progress` is told of loaded tensors.

        `speculation` says who guesses ahead, as vLLM's `speculative_config`:
        `{"method": "ngram", "num_speculative_tokens": 5}`. It never changes the text.
        """
        wanted = None if speculation is None else SpeculationConfig.parse(speculation)
        self._loaded: LoadedModel = load_model(
            model, dtype=dtype, device=device, backend=backend, progress=progress
        )
        self.tokenizer = self._loaded.tokenizer
        self._config = config
        self.engine = self._engine(wanted)

    def speculate(self, speculation: str | Mapping[str, Any] | None) -> None:
        """Change who guesses ahead, or turn it off with None, without loading the model again."""
        self.engine = self._engine(None if speculation is None else SpeculationConfig.parse(speculation))

    def build_drafter(self, wanted: SpeculationConfig) -> Drafter:
        """A drafter for this model that no engine uses yet."""
        return wanted.build(self._loaded.workshop())

    def _engine(self, wanted: SpeculationConfig | None) -> Engine:
        policy = FixedPolicy()
        if wanted is not None:
            rule = Rule.parse((self._config or EngineConfig()).acceptance_rule)
            check_exact(rule, is_chain=not wanted.makes_trees)
            drafter = self.build_drafter(wanted)
            policy = FixedPolicy(drafter, wanted.num_speculative_tokens, wanted.max_depth)
        return Engine(self._loaded.decoder, self.tokenizer.eos_ids, self._config, policy)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raw: bool = False,
        on_text: OnText | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, all in the same passes.

        A text prompt of a model with a chat template is sent as a user's message unless `raw`.
        """
        listed: Sequence[Prompt] = [prompts] if isinstance(prompts, str | Mapping) else prompts
        return self._run(listed, [self.encode(prompt, raw) for prompt in listed], params, on_text)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_text: OnText | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several."""
        listed = [messages] if messages and isinstance(messages[0], Mapping) else messages
        encoded = [self.tokenizer.encode_chat(conversation) for conversation in listed]  # type: ignore[arg-type]
        return self._run([None] * len(encoded), encoded, params, on_text)

    def encode(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """The token ids that `generate` makes of a prompt."""
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" not in prompt:
                raise RequestError('a prompt is a string or {"prompt_token_ids": [...]}')
            return list(prompt["prompt_token_ids"])
        if raw or self.tokenizer.chat_template is None:
            return self.tokenizer.encode(prompt)
        return self.tokenizer.encode_chat([{"role": "user", "content": prompt}])

    def _run(
        self,
        prompts: Sequence[Prompt | None],
        encoded: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        on_text: OnText | None,
    ) -> list[RequestOutput]:
        streams: list[_Stream] = []
        try:
            for ids, chosen in zip(encoded, _spread(params, len(encoded)), strict=True):
                words = bad_word_ids(self.tokenizer, chosen.bad_words)
                request = self.engine.add(ids, chosen, words)
                streams.append(_Stream(request, self.tokenizer))
            by_request = {stream.request.request_id: i for i, stream in enumerate(streams)}
            while any(stream.request.finish_reason is None for stream in streams):
                for request in self.engine.step():
                    index = by_request[request.request_id]
                    text = streams[index].advance()
                    if text and on_text is not None:
                        on_text(index, text)
        finally:
            for stream in streams:
                self.engine.abort(stream.request)
        return [stream.output(prompt) for stream, prompt in zip(streams, prompts, strict=True)]


class _Stream:
    """The text of a growing answer."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._seen = 0
        self._text = ""

    def advance(self) -> str:
        """Text of the tokens since the last call."""
        fresh = self.request.output_ids[self._seen :]
        self._seen += len(fresh)
        text = "".join(self._detokenizer.push(token) for token in fresh)
        if self.request.finish_reason is not None:
            text += self._detokenizer.finish()
        self._text += text
        return text

    def _logprobs(self) -> list[dict[int, Logprob]]:
        def shown(token: int, logprob: float, rank: int) -> Logprob:
            return Logprob(logprob, rank, self._tokenizer.decode([token], skip_special_tokens=False))

        positions = []
        for found in self.request.logprobs:
            top = zip(found.top_ids.tolist(), found.top_logprobs.tolist(), strict=True)
            entries = {token: shown(token, value, place + 1) for place, (token, value) in enumerate(top)}
            entries.setdefault(found.token, shown(found.token, found.logprob, found.rank))
            positions.append(entries)
        return positions

    def output(self, prompt: Prompt | None) -> RequestOutput:
        request = self.request
        answer = CompletionOutput(
            index=0,
            text=self._text,
            token_ids=request.output_ids,
            finish_reason=request.finish_reason,
            seed=request.sampler.seed,
            logprobs=None if request.params.logprobs is None else self._logprobs(),
            error=request.error,
        )
        shown = prompt if isinstance(prompt, str) else None
        ids = request.tokens[: request.prompt_len]
        return RequestOutput(shown, ids, [answer], Timings.of(request))


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Every bad word as token ids, at the start of a text and behind a space."""
    spelled = (
        tokenizer.encode(text, add_special_tokens=False) for word in words for text in (word, f" {word}")
    )
    return [list(ids) for ids in {tuple(ids): None for ids in spelled if ids}]


def _spread(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One set of parameters for every prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(
            f"{count} prompts need 1 or {count} sets of sampling parameters, not {len(params)}"
        )
    return list(params)
