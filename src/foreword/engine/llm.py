"""The `LLM` class: offline inference in the style of vLLM."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Unpack

from foreword.acceptance.params import SamplingParams
from foreword.drafters.config import SpeculationConfig, SpeculationSetting
from foreword.engine.adapters import Adapters, LoRARequest
from foreword.engine.assembly import load_core, make_core
from foreword.engine.config import EngineConfig
from foreword.engine.core import EngineCore
from foreword.engine.drafting.default_speculation import SpeculationOption
from foreword.engine.drafting.drafter_pool import PagesLackRows
from foreword.engine.loader import LoadOptions
from foreword.engine.messages import NewRequest
from foreword.engine.outputs import OutputCollector, RequestOutput
from foreword.engine.prompts import (
    ParamsChoice,
    Prediction,
    Prompt,
    encode_prediction,
    encode_prompt,
    filling,
    listed_predictions,
    listed_prompts,
    one_per_prompt,
    only_given,
)
from foreword.engine.step_pipeline import StepPipeline
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

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        speculation: SpeculationOption = "auto",
        config: EngineConfig | None = None,
        preparing: Progress | None = None,
        **options: Unpack[LoadOptions],
    ) -> None:
        """Load `model`: a built-in name, a local path or a hub id.

        - `speculation`: the drafter, as in vLLM's `speculative_config`, for example
          `{"method": "ngram", "num_speculative_tokens": 5}`. "off", False or None: no drafter. "auto" or True: see
          docs/drafters.md. It never changes the text.
        - `preparing` is called with the number of captured passes (see `EngineConfig.enforce_eager`), `progress` with
          the number of loaded tensors.
        - `dtype`, `device` and `backend`: "auto" fits them to the machine.
        - `quantization`: "auto" for weights as the checkpoint has them, "none", "fp8" or "int4" (GPU: docs/gpu.md).
        - `kv_cache_dtype`: "fp8" stores keys and values in 8 bits on a GPU (docs/gpu.md); on a CPU, "float32",
          "bfloat16" or "int8" (docs/kernels.md).
        - `generation_config`: "auto" for the sampling parameters that the model's makers recommend, used if a call
          gives none, or "none".
        - `tensor_parallel_size`: number of processes that share the model, one GPU each or all on this CPU
          (docs/cluster.md).
        """
        self._config = config or EngineConfig()
        self._preparing = preparing
        self.loaded, core = load_core(model, self._config, speculation, preparing, **options)
        self.tokenizer = self.loaded.tokenizer
        self._use(core)
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
            choice = self.loaded.choose_speculation(speculation, self._config.acceptance_rule)
            self.engine.drafters.set_default(choice.config)
        except PagesLackRows:
            self._replace_engine(speculation)

    def offer(self, speculation: Sequence[SpeculationConfig]) -> None:
        """Lay out the KV pages for heads that later calls select with their own `speculation`."""
        self._check_idle()
        self._replace_engine(self._default(), speculation)

    def _default(self) -> SpeculationOption:
        """Return the current drafter as a `speculation` setting."""
        default = self.engine.drafters.default_config
        return None if default is None else default.as_mapping()

    @property
    def adapters(self) -> Adapters:
        """The loaded LoRA adapters; `lora_request` loads others."""
        return self.engine.adapters

    def _replace_engine(
        self, speculation: SpeculationOption, offered: Sequence[SpeculationConfig] = ()
    ) -> None:
        """Replace the engine after freeing its memory; on failure, restore the previous drafters and adapters."""
        old_speculation, adapters = self._default(), self.engine.adapters
        self.engine.close()
        del self.engine, self._pipeline
        try:
            self._use(make_core(self.loaded, self._config, speculation, offered, preparing=self._preparing))
        except BaseException:
            self._use(make_core(self.loaded, self._config, old_speculation, preparing=self._preparing))
            self.engine.adapters.take_over(adapters)
            raise
        self.engine.adapters.take_over(adapters)

    def _use(self, core: EngineCore) -> None:
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

        - `params`, or vLLM's name `sampling_params`: None for the model's defaults.
        - `raw`: continue a text prompt as it is. Otherwise it becomes a user's message, if the model has a chat
          template. In raw text, names of control tokens become these tokens unless `parse_special` is False.
        - `suffix`: prompts are raw texts before a gap that the answer fills; the suffix follows the gap.
        - `speculation`: False for plain decoding, or the keys of a configuration that differ from the model's.
        - `prediction`: the expected answer, text or token ids. Where the answer matches, it takes few passes.
        - `lora_request`: a LoRA adapter. `priority` is vLLM's: lower values start first.
        - `deadline_ms`: answers end this long after the call, complete or not.
        - `on_text` receives the first of n answers.

        `params`, `speculation`, `prediction`, `lora_request` and `priority` apply to all prompts, or are lists with
        one entry per prompt.
        """
        self._check_idle()
        listed = listed_prompts(prompts)
        count = len(listed)
        encoded = [self.encode(prompt, raw, parse_special, suffix) for prompt in listed]
        given = one_per_prompt(only_given(params, sampling_params), count, "sets of sampling parameters")
        settings: Sequence[SpeculationSetting] = one_per_prompt(speculation, count, "speculation settings")
        predictions = listed_predictions(prediction, count)
        loras = one_per_prompt(lora_request, count, "adapters")
        priorities = one_per_prompt(priority, count, "priorities")
        requests = [
            NewRequest(
                f"llm-{next(self._numbers)}",
                tuple(ids),
                filling(self.tokenizer, given[index] or self.get_default_sampling_params(), suffix),
                speculation=settings[index],
                prediction=encode_prediction(self.tokenizer, predictions[index]),
                priority=priorities[index],
                deadline_ms=deadline_ms,
                adapter=self.engine.adapters.ensure(loras[index]),
            )
            for index, ids in enumerate(encoded)
        ]
        return self._run(listed, requests, on_text)

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
        """Generate answers for one conversation or several; the options are those of `generate`."""
        listed = [messages] if messages and isinstance(messages[0], Mapping) else messages
        encoded = [self.tokenizer.encode_chat(conversation) for conversation in listed]  # type: ignore[arg-type]
        return self.generate(
            [{"prompt_token_ids": ids} for ids in encoded],
            params,
            sampling_params=sampling_params,
            speculation=speculation,
            prediction=prediction,
            lora_request=lora_request,
            priority=priority,
            deadline_ms=deadline_ms,
            on_text=on_text,
        )

    def encode(
        self, prompt: Prompt, raw: bool = False, parse_special: bool = True, suffix: str | None = None
    ) -> list[int]:
        """Return the token ids that `generate` uses for a prompt."""
        return encode_prompt(self.tokenizer, prompt, raw, parse_special=parse_special, suffix=suffix)

    def _run(
        self, prompts: Sequence[Prompt], requests: Sequence[NewRequest], on_text: OnText | None
    ) -> list[RequestOutput]:
        """Answer all requests and return their outputs in order."""
        collectors: dict[str, OutputCollector] = {}
        self._is_busy = True
        try:
            for prompt, new in zip(prompts, requests, strict=True):
                self.engine.add(new)
                text, ids = prompt if isinstance(prompt, str) else None, new.prompt_token_ids
                collectors[new.request_id] = OutputCollector(
                    new.request_id, text, ids, new.params, self.tokenizer
                )
            self._finish(collectors, on_text)
        finally:
            self._is_busy = False
            for name in collectors:
                self.engine.abort(name)
        return [collector.output() for collector in collectors.values()]

    def _check_idle(self) -> None:
        if self._is_busy:
            raise RequestError("an LLM answers one call at a time; use foreword.Engine for more")

    def _finish(self, collectors: Mapping[str, OutputCollector], on_text: OnText | None) -> None:
        """Run steps until all answers have ended, and pass their deltas to the collectors and to `on_text`."""
        indices = {name: index for index, name in enumerate(collectors)}
        while not all(collector.finished for collector in collectors.values()):
            for delta in self._pipeline.advance():
                collectors[delta.request_id].take(delta)
                if delta.text and delta.index == 0 and on_text is not None:
                    on_text(indices[delta.request_id], delta.text)
