"""The `LLM` class: offline inference in the style of vLLM."""

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
"""One adapter for all prompts, or one for each; None: the base model."""

OnText = Callable[[int, str], None]
"""Called with (prompt index, new text) as text becomes final."""


class LLM:
    """Loads a model and generates answers.

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
        quantization: str = "auto",
        kv_cache_dtype: str = "auto",
        speculation: SpeculationOption = "auto",
        generation_config: str = "auto",
        tensor_parallel_size: int = 1,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        preparing: Progress | None = None,
    ) -> None:
        """Load `model`: a built-in name, a local path or a hub id.

        `progress` is called with loaded tensors, `preparing` with captured passes (see `EngineConfig.enforce_eager`).

        `quantization` is "auto" for weights as the checkpoint has them, "none", "fp8" or "int4". With
        `kv_cache_dtype` "fp8", keys and values are kept in 8 bits. Both are for a GPU: docs/gpu.md. On a CPU,
        `kv_cache_dtype` is "float32" or "bfloat16": docs/kernels.md.

        `speculation` is the drafter, as in vLLM's `speculative_config`:
        `{"method": "ngram", "num_speculative_tokens": 5}`; "off", False or None: no drafter; "auto" or True: see
        docs/drafters.md. It never changes the text. `generation_config` is "auto" for the sampling parameters that the
        model's makers recommend, used if a call gives none, or "none". A `tensor_parallel_size` above 1 divides the
        model between that many processes, one GPU each or all on this CPU: docs/cluster.md.
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
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            progress=progress,
            generation_config=generation_config,
            tensor_parallel_size=tensor_parallel_size,
        )
        self.tokenizer = self.loaded.tokenizer
        self._take(core)
        self._numbers = itertools.count()
        self._is_busy = False

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of calls that give none; see `generation_config`."""
        return self.loaded.sampling.params()

    def speculate(self, speculation: SpeculationOption) -> None:
        """Change the drafter, or turn speculation off with False or "off", without reloading the model.

        A head that needs rows in the KV pages changes their layout, which clears the prefix cache.
        """
        self._check_idle()
        try:
            self.engine.drafters.set_default(chosen_speculation(speculation, self.loaded, self._config))
        except PagesLackRows:
            self._make_again(speculation)

    def offer(self, speculation: Sequence[SpeculationConfig]) -> None:
        """Lay out the KV pages for heads that later calls select with their own `speculation`."""
        self._check_idle()
        self._make_again(self._default(), speculation)

    def _default(self) -> SpeculationOption:
        default = self.engine.drafters.default_config
        return None if default is None else default.as_mapping()

    @property
    def adapters(self) -> Adapters:
        """The loaded LoRA adapters; `lora_request` loads others."""
        return self.engine.adapters

    def _make_again(self, speculation: SpeculationOption, offered: Sequence[SpeculationConfig] = ()) -> None:
        """Replace the engine after freeing its memory; on failure, restore the previous drafters and adapters."""
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
        """Release drafters and end other ranks; the LLM cannot be used afterwards."""
        self.engine.close()
        self.loaded.close()

    def build_drafter(self, wanted: SpeculationConfig) -> Drafter:
        """Return a new drafter for this model that no engine uses."""
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
        """Generate answers for prompts (text or token ids), all in the same passes.

        `sampling_params` is vLLM's name of `params`. A text prompt of a model with a chat template becomes a user's
        message unless `raw`; in raw text, names of control tokens become these tokens unless `parse_special` is False.
        With a `suffix`, prompts are raw texts before a gap that the answer fills; the suffix follows it.
        `speculation` is False for plain decoding, or the keys of a configuration that differ from the model's.
        `prediction` is the expected answer, text or token ids: as far as the answer matches it, it takes few passes.
        Both are given for all prompts or one for each. `lora_request` names a LoRA adapter. `priority` is vLLM's: lower
        values start first. Answers end `deadline_ms` after the call, complete or not. `on_text` receives the first of n
        answers.
        """
        listed = listed_prompts(prompts)
        encoded = [self.encode(prompt, raw, parse_special, suffix) for prompt in listed]
        given = either(params, sampling_params)
        options = _CallOptions(on_text, speculation, prediction, lora_request, priority, deadline_ms, suffix)
        return self._run(listed, encoded, given, options)

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
        """Generate answers for one conversation or several."""
        listed = [messages] if messages and isinstance(messages[0], Mapping) else messages
        encoded = [self.tokenizer.encode_chat(conversation) for conversation in listed]  # type: ignore[arg-type]
        given = either(params, sampling_params)
        options = _CallOptions(on_text, speculation, prediction, lora_request, priority, deadline_ms)
        return self._run([None] * len(encoded), encoded, given, options)

    def encode(
        self, prompt: Prompt, raw: bool = False, parse_special: bool = True, suffix: str | None = None
    ) -> list[int]:
        """Return the token ids that `generate` uses for a prompt."""
        return encode_prompt(self.tokenizer, prompt, raw, parse_special=parse_special, suffix=suffix)

    def _run(
        self,
        prompts: Sequence[Prompt | None],
        encoded: Sequence[list[int]],
        params: ParamsChoice,
        options: "_CallOptions",
    ) -> list[RequestOutput]:
        self._check_idle()
        chosen_params = spread(params, len(encoded), "sets of sampling parameters")
        settings: Sequence[SpeculationSetting] = spread(
            options.speculation, len(encoded), "speculation settings"
        )
        predictions = listed_predictions(options.prediction, len(encoded))
        expected = [encode_prediction(self.tokenizer, prediction) for prediction in predictions]
        adapters = spread(options.lora_request, len(encoded), "adapters")
        names = [self.engine.adapters.ensure(wanted) for wanted in adapters]
        priorities = spread(options.priority, len(encoded), "priorities")
        collectors: dict[str, OutputCollector] = {}
        self._is_busy = True
        try:
            for prompt, ids, given, setting, answer, adapter, priority in zip(
                prompts, encoded, chosen_params, settings, expected, names, priorities, strict=True
            ):
                name = f"llm-{next(self._numbers)}"
                chosen = given or self.get_default_sampling_params()
                chosen = filling(self.tokenizer, chosen, options.suffix)
                new = NewRequest(name, tuple(ids), chosen, speculation=setting, prediction=answer)
                self.engine.add(
                    replace(new, adapter=adapter, priority=priority, deadline_ms=options.deadline_ms)
                )
                shown = prompt if isinstance(prompt, str) else None
                collectors[name] = OutputCollector(name, shown, ids, chosen, self.tokenizer)
            self._finish(collectors, options.on_text)
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
class _CallOptions:
    """Options of a call besides the sampling parameters."""

    on_text: OnText | None
    speculation: "SpeculationSetting | Sequence[SpeculationSetting]"
    prediction: "Prediction | Sequence[Prediction]"
    lora_request: LoraChoice
    priority: int | Sequence[int]
    deadline_ms: float | None
    suffix: str | None = None
