"""Fields of other servers that this one does not implement: which of them are refused, and which are ignored.

A field is refused if it would change the answer: its distribution, prompt or format. Other fields, and unknown ones,
are ignored unless the server runs with `--strict-fields`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class ForeignField:
    """A known field that is not implemented."""

    reason: str = ""  # why a request with the field is refused; empty: the field is ignored
    neutral: tuple[object, ...] = ()  # values without effect, which are accepted, besides null

    def is_neutral(self, value: object) -> bool:
        """Return whether the value has no effect."""
        # True equals 1 in Python, but not in JSON.
        comparable = [entry for entry in self.neutral if isinstance(entry, bool) == isinstance(value, bool)]
        return value is None or value in comparable


Fields = Mapping[str, ForeignField]
"""Foreign fields by name."""


def _refused(reason: str, *neutral: object) -> ForeignField:
    """Return a field that is refused, unless its value is one of the `neutral` ones."""
    return ForeignField(reason, neutral)


def _ignored(*neutral: object) -> ForeignField:
    return ForeignField("", neutral)


# Reasons; they follow "FIELD: is not supported by this server: ".
_NO_SAMPLER: Final = "it does not have this sampler"
_NO_CODE: Final = "it runs no code of clients"
_TOP_LEVEL: Final = "put its entries at the top level of the body"
_CHAT: Final = "use /v1/chat/completions"
_TEXT: Final = "it takes and generates text only; send a description or a transcript"
_TEMPLATE: Final = "the template comes from the model"
_NO_STATE: Final = "it keeps no state between requests; send the whole conversation"

GENERATING: Final[Fields] = {
    # Fields that would change the distribution.
    "use_beam_search": _refused("it has no beam search", False),
    "num_beams": _refused("it has no beam search", 1),
    "do_sample": _refused("use temperature", True),
    "samplers": _refused("the order of its samplers is fixed"),
    "logits_processors": _refused(_NO_CODE, []),
    "logit_processors": _refused(_NO_CODE, []),
    "top_n_sigma": _refused(_NO_SAMPLER, -1, 0),
    **dict.fromkeys(("typical_p", "tfs_z", "guidance_scale"), _refused(_NO_SAMPLER, 1)),
    **dict.fromkeys(("top_a", "mirostat", "mirostat_mode", "xtc_probability"), _refused(_NO_SAMPLER, 0)),
    **dict.fromkeys(("dry_multiplier", "dynatemp_range", "smoothing_factor"), _refused(_NO_SAMPLER, 0)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size"), _refused(_NO_SAMPLER, 0)),
    "watermark": _refused("it does not watermark texts", False),
    "lora": _refused("name the adapter as the model", []),
    # Fields that would change the prompt, or the format of the answer.
    "options": _refused(_TOP_LEVEL, {}),
    "parameters": _refused(_TOP_LEVEL, {}),
    "extra_body": _refused(_TOP_LEVEL, {}),
    "system": _refused("send it as a message"),
    "context": _refused(_NO_STATE, []),
    "template": _refused(_TEMPLATE, ""),
    "chat_template": _refused(_TEMPLATE),
    "documents": _refused("put them into the prompt", []),
    "images": _refused(_TEXT, []),
    "prompt_embeds": _refused("it takes text and token ids"),
    "truncate_prompt_tokens": _refused("it does not truncate prompts"),
    "skip_special_tokens": _refused("texts have no special tokens; use return_token_ids", True),
    "return_tokens_as_token_ids": _refused("use return_token_ids", False),
    "audio": _refused(_TEXT),
    "modalities": _refused(_TEXT, ["text"]),
    "web_search_options": _refused("it has no web search"),
    "mcp_servers": _refused("it calls no tools; give their functions as tools", []),
    "functions": _refused("use tools", []),
    "function_call": _refused("use tool_choice", "none", "auto"),
    # Fields that are ignored, with their values without effect.
    "reasoning_effort": _ignored(),
    "verbosity": _ignored(),
    "service_tier": _ignored("auto", "default"),
    "store": _ignored(False),
}
"""Fields of all routes that generate."""

_NO_TOOLS: Final[Fields] = {
    "messages": _refused(_CHAT),
    "tools": _refused(_CHAT, []),
    "tool_choice": _refused(_CHAT, "none", "auto"),
}

COMPLETION: Final[Fields] = {**GENERATING, **_NO_TOOLS}

CHAT: Final[Fields] = {
    **GENERATING,
    "best_of": _refused("request n answers with logprobs and choose", 1),
    "echo": _refused("use /v1/completions", False),
    "suffix": _refused("use /v1/completions", ""),
    "add_special_tokens": _refused("the chat template decides", False),
}

_NO_TEMPLATE_OPTIONS: Final[Fields] = {
    "chat_template_kwargs": _refused(_CHAT, {}),
    "add_generation_prompt": _refused(_CHAT, True),
    "continue_final_message": _refused(_CHAT, False),
    "echo": _refused("use /v1/completions", False),
    "suffix": _refused("use /v1/completions", ""),
    "best_of": _refused("request n answers with logprobs and choose", 1),
}

GENERATE: Final[Fields] = {**GENERATING, **_NO_TOOLS, **_NO_TEMPLATE_OPTIONS}

RESPONSES: Final[Fields] = {
    **GENERATING,
    **_NO_TEMPLATE_OPTIONS,
    "previous_response_id": _refused(_NO_STATE),
    "conversation": _refused(_NO_STATE),
    "background": _refused("it does not answer in the background", False),
    "prompt": _refused("it stores no prompts; use input and instructions"),
    "include": _refused("it has no additional output", [], ["reasoning.encrypted_content"]),
    "logprobs": _refused(_CHAT, False),
    "top_logprobs": _refused(_CHAT, 0),
    "reasoning": _ignored(),
    "truncation": _ignored("disabled"),
}

TOKENIZE: Final[Fields] = {
    "tools": _refused("/tokenize passes no tools to the template", []),
    "chat_template": _refused(_TEMPLATE),
    "chat_template_kwargs": _refused("/tokenize passes no variables to the template", {}),
    "continue_final_message": _refused("/tokenize ends every message", False),
}

MESSAGE: Final[Fields] = {
    "images": _refused(_TEXT, []),
    "prefix": _refused("use continue_final_message", False),
    "partial": _refused("use continue_final_message", False),
    "annotations": _ignored([]),
}

TOOL_FUNCTION: Final[Fields] = {"input_schema": _refused("use parameters")}

_LENGTH = ("max_tokens", "max_output_tokens")  # names of the answer's maximum length

RENAMED: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens", "max_length"), _LENGTH),
    "max_completion_tokens": _LENGTH,
    "max_output_tokens": ("max_tokens",),
    "max_tokens": ("max_output_tokens",),
    "repeat_penalty": ("repetition_penalty",),
    "stop_sequences": ("stop",),
    "stop_strings": ("stop",),
    "eos_token_id": ("stop_token_ids",),
    "bad_words_ids": ("bad_words",),
    "n_probs": ("logprobs",),
    "choice": ("guided_choice",),
    "regex": ("guided_regex",),
    "json": ("guided_json",),
    "format": ("response_format", "text"),
    "response_schema": ("json_schema",),
    "response_format": ("text", "structured_outputs"),
    "guided_decoding": ("structured_outputs",),
    "structural_tag": ("structured_outputs",),
    "input": ("prompt", "messages"),
    "inputs": ("prompt", "messages", "input"),
    "prompt": ("messages", "input"),
    "messages": ("input",),
    "text": ("prompt",),
    "content": ("prompt",),
    "ids": ("tokens",),
    "token_ids": ("tokens",),
}
"""Field name of vLLM, llama.cpp, TGI and others -> this server's names; errors suggest the first that a route has."""
