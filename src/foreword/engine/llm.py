"""The library's front door."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from foreword.acceptance.params import SamplingParams
from foreword.drafters.config import SpeculationConfig, SpeculationSetting
from foreword.engine.adapters import Adapters, LoRARequest
from foreword.engine.assembly import chosen_speculation, load_core, make_core
from foreword.engine.config import EngineConfig
from foreword.engine.core import EngineCore
from foreword.engine.drafting.default_speculation import SpeculationOption
from foreword.engine.drafting.drafter_pool import PagesLackRows
from foreword.engine.messages import NewRequest
from foreword.engine.outputs import OutputCollector, RequestOutput
from foreword.engine.pipeline import StepPipeline
from foreword.engine.prompts import (
    ParamsChoice,
    Prediction,
    Prompt,
    either,
    encode_prediction,
    encode_prompt,
    filling,
    listed_predictions,
    listed_prompts,
    spread,
)
from foreword.errors import RequestError
from foreword.models.sources.builtin import DEFAULT_MODEL
from foreword.progress import Progress
from foreword.speculation.drafting import Drafter

Messages = Sequence[Mapping[str, str]]
"""A conversation: `[{"role": "user", "content": "..."}]`."""

LoraChoice = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts or one for each; None: the model itself."""

OnText = Callable[[int, str], None]
"""Called with (index of the prompt, new text) as text becomes certain."""


class LLM:
    """Loads a model and answers prompts.

    >>> llm = LLM("smollm2-135m")
    >>> llm.generate("Why is the sky blue?", SamplingParams(temperature=0))[0].outputs[0].text
    """

    def __init__(  # noqa: PLR0913 - vLLM's names
        self,
        model: str = DEFAULT_MODEL,
        *,
        dtype: str = "auto",
        device: str = "auto",
        backend: str = "auto",
        speculation: SpeculationOption = "auto",
        generation_config: str = "auto",
        tensor_parallel_size: int = 1,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        preparing: Progress | None = None,
    ) -> None:
        """Load `model`: a built-in name, a local path or a hub id; `progress` is called with loaded tensors.

        `preparing` is then called with the passes that a GPU prepares (`EngineConfig.enforce_eager`).

        `speculation` names the drafter, as vLLM's `speculative_config`:
        `{"method": "ngram", "num_speculative_tokens": 5}`; "off", False or None: no drafter; "auto" or True: see
        docs/drafters.md. It never changes the text. `generation_config` is "auto" for the sampling parameters that the
        model's makers recommend, where a call gives none, or "none". With a `tensor_parallel_size` above 1 that many
        processes have a share of the model each, on a GPU each or all on this CPU: docs/cluster.md.
        """
        self._config = config or EngineConfig()
        self._preparing = preparing
        self.loaded, core = load_core(
            model,
            self._config,
            speculation,
            preparing,
            dtype=dtype,
            device=device,
            backend=backend,
            progress=progress,
            generation_config=generation_config,
            tensor_parallel_size=tensor_parallel_size,
        )
        self.tokenizer = self.loaded.tokenizer
        self._take(core)
        self._numbers = itertools.count()
        self._is_busy = False

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where a call gives none: the model's own, see `generation_config`."""
        return self.loaded.sampling.params()

    def speculate(self, speculation: SpeculationOption) -> None:
        """Change the drafter, or turn speculation off with False or "off", without loading the model again.

        For a head that keeps rows in the KV pages these are laid out anew: what the prefix cache has is lost.
        """
        self._check_idle()
        try:
            self.engine.drafters.set_default(chosen_speculation(speculation, self.loaded, self._config))
        except PagesLackRows:
            self._make_again(speculation)

    def offer(self, speculation: Sequence[SpeculationConfig]) -> None:
        """Lay the KV pages out for heads that calls will ask for by their own `speculation`."""
        self._check_idle()
        self._make_again(self._default(), speculation)

    def _default(self) -> SpeculationOption:
        default = self.engine.drafters.default_config
        return None if default is None else default.as_mapping()

    @property
    def adapters(self) -> Adapters:
        """The LoRA adapters that were loaded; `lora_request` loads what it names."""
        return self.engine.adapters

    def _make_again(self, speculation: SpeculationOption, offered: Sequence[SpeculationConfig] = ()) -> None:
        """Replace the engine, whose memory is freed first; if that fails, by one with its drafters and adapters."""
        before, adapters = self._default(), self.engine.adapters
        self.engine.close()
        del self.engine, self._pipeline
        try:
            self._take(make_core(self.loaded, self._config, speculation, offered, preparing=self._preparing))
        except BaseException:
            self._take(make_core(self.loaded, self._config, before, preparing=self._preparing))
            self.engine.adapters.take_over(adapters)
            raise
        self.engine.adapters.take_over(adapters)

    def _take(self, core: EngineCore) -> None:
        self.engine, self._pipeline = core, StepPipeline(core)

    def close(self) -> None:
        """Give back what drafters hold, and end other ranks; the LLM answers no more."""
        self.engine.close()
        self.loaded.close()

    def build_drafter(self, wanted: SpeculationConfig) -> Drafter:
        """A drafter for this model that no engine uses yet."""
        return self.loaded.build_drafter(wanted)

    def generate(  # noqa: PLR0913 - vLLM's names
        self,
        prompts: Prompt | Sequence[Prompt],
        params: ParamsChoice = None,
        *,
        sampling_params: ParamsChoice = None,
        raw: bool = False,
        parse_special: bool = True,
        suffix: str | None = None,
        speculation: SpeculationSetting | Sequence[SpeculationSetting] = None,
        prediction: Prediction | Sequence[Prediction] = None,
        lora_request: LoraChoice = None,
        priority: int | Sequence[int] = 0,
        deadline_ms: float | None = None,
        on_text: OnText | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, all in the same passes: texts, or their token ids.

        `sampling_params` is vLLM's name of `params`. A text prompt of a model with a chat template is sent as a user's
        message unless `raw`; in raw text control tokens' names become those tokens, unless `parse_special` is False.
        With a `suffix`, prompts are raw texts before a gap that the answer fills; the suffix follows it.
        `speculation` is False for plain decoding, or the keys of a configuration that differ from the model's; one for
        all prompts or one for each. `prediction` is the answer that is expected, a text or its token ids, for all
        prompts or for each: where the answer follows it, it takes few passes. `lora_request` names a LoRA adapter.
        `priority` is vLLM's: a lower value begins first. Answers end `deadline_ms` after the call, whole or not.
        `on_text` hears the first of n answers.
        """
        listed = listed_prompts(prompts)
        encoded = [self.encode(prompt, raw, parse_special, suffix) for prompt in listed]
        given = either(params, sampling_params)
        how = _How(on_text, speculation, prediction, lora_request, priority, deadline_ms, suffix)
        return self._run(listed, encoded, given, how)

    def chat(  # noqa: PLR0913 - vLLM's names
        self,
        messages: Messages | Sequence[Messages],
        params: ParamsChoice = None,
        *,
        sampling_params: ParamsChoice = None,
        speculation: SpeculationSetting | Sequence[SpeculationSetting] = None,
        prediction: Prediction | Sequence[Prediction] = None,
        lora_request: LoraChoice = None,
        priority: int | Sequence[int] = 0,
        deadline_ms: float | None = None,
        on_text: OnText | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several."""
        listed = [messages] if messages and isinstance(messages[0], Mapping) else messages
        encoded = [self.tokenizer.encode_chat(conversation) for conversation in listed]  # type: ignore[arg-type]
        given = either(params, sampling_params)
        how = _How(on_text, speculation, prediction, lora_request, priority, deadline_ms)
        return self._run([None] * len(encoded), encoded, given, how)

    def encode(
        self, prompt: Prompt, raw: bool = False, parse_special: bool = True, suffix: str | None = None
    ) -> list[int]:
        """Return the token ids that `generate` makes of a prompt."""
        return encode_prompt(self.tokenizer, prompt, raw, parse_special=parse_special, suffix=suffix)

    def _run(
        self,
        prompts: Sequence[Prompt | None],
        encoded: Sequence[list[int]],
        params: ParamsChoice,
        how: "_How",
    ) -> list[RequestOutput]:
        self._check_idle()
        chosen_params = spread(params, len(encoded), "sets of sampling parameters")
        settings: Sequence[SpeculationSetting] = spread(how.speculation, len(encoded), "speculation settings")
        predictions = listed_predictions(how.prediction, len(encoded))
        expected = [encode_prediction(self.tokenizer, prediction) for prediction in predictions]
        adapters = spread(how.lora_request, len(encoded), "adapters")
        names = [self.engine.adapters.ensure(wanted) for wanted in adapters]
        priorities = spread(how.priority, len(encoded), "priorities")
        collectors: dict[str, OutputCollector] = {}
        self._is_busy = True
        try:
            for prompt, ids, given, setting, answer, adapter, priority in zip(
                prompts, encoded, chosen_params, settings, expected, names, priorities, strict=True
            ):
                name = f"llm-{next(self._numbers)}"
                chosen = given or self.get_default_sampling_params()
                chosen = filling(self.tokenizer, chosen, how.suffix)
                new = NewRequest(name, tuple(ids), chosen, speculation=setting, prediction=answer)
                self.engine.add(replace(new, adapter=adapter, priority=priority, deadline_ms=how.deadline_ms))
                shown = prompt if isinstance(prompt, str) else None
                collectors[name] = OutputCollector(name, shown, ids, chosen, self.tokenizer)
            self._finish(collectors, how.on_text)
        finally:
            self._is_busy = False
            for name in collectors:
                self.engine.abort(name)
        return [collector.output() for collector in collectors.values()]

    def _check_idle(self) -> None:
        if self._is_busy:
            raise RequestError("an LLM answers one call at a time; use foreword.Engine for more")

    def _finish(self, collectors: Mapping[str, OutputCollector], on_text: OnText | None) -> None:
        places = {name: place for place, name in enumerate(collectors)}
        while not all(collector.finished for collector in collectors.values()):
            for delta in self._pipeline.advance():
                collectors[delta.request_id].take(delta)
                if delta.text and delta.index == 0 and on_text is not None:
                    on_text(places[delta.request_id], delta.text)


@dataclass(frozen=True)
class _How:
    """How prompts are answered, besides their parameters."""

    on_text: OnText | None
    speculation: "SpeculationSetting | Sequence[SpeculationSetting]"
    prediction: "Prediction | Sequence[Prediction]"
    lora_request: LoraChoice
    priority: int | Sequence[int]
    deadline_ms: float | None
    suffix: str | None = None
