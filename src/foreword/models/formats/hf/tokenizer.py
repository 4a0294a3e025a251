"""Creates a tokenizer from a Hugging Face directory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from foreword.errors import TokenizerError
from foreword.models.tokenization.chat_template import ChatTemplate
from foreword.models.tokenization.token_pieces import piece_decoder_of
from foreword.models.tokenization.tokenizer import Tokenizer, TokenizerParts

_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")  # names that chat templates use


def hf_tokenizer(directory: Path, config: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer in `directory`; `config` is its config.json."""
    backend = _load_backend(directory / "tokenizer.json")
    settings = _optional_json(directory / "tokenizer_config.json")
    names = {key: name for key in _TEMPLATE_TOKENS if (name := _token_text(settings.get(key))) is not None}
    source = _template_source(directory, settings)
    decode_piece, strips_leading_space = piece_decoder_of(backend)
    eos_ids = _declared_eos(directory, config)
    if "eos_token" in names:
        eos_ids |= {backend.token_to_id(names["eos_token"])}
    bos = backend.token_to_id(names["bos_token"]) if "bos_token" in names else None
    return Tokenizer(
        TokenizerParts(
            backend=backend,
            decode_piece=decode_piece,
            strips_leading_space=strips_leading_space,
            eos_ids=frozenset(i for i in eos_ids if i is not None),
            bos_id=bos,
            template=ChatTemplate(source, names) if source is not None else None,
        )
    )


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.exists():
        raise TokenizerError(
            f"{path} is missing; get it, or save the model's fast tokenizer into the directory"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        reason = " ".join(str(error).split())
        raise TokenizerError(f"{path} cannot be read ({reason}); get the file again") from None


def _optional_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is missing."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError):
        raise TokenizerError(f"{path} is not valid JSON; get the file again") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} is not a JSON object; get the file again")
    return value


def _token_text(value: Any) -> str | None:  # noqa: ANN401
    """Return the text of a token in tokenizer_config.json, which is a string or an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _declared_eos(directory: Path, config: Mapping[str, Any]) -> set[int | None]:
    """Return the ids that generation_config.json, or else config.json, declares as end of sequence."""
    generation = _optional_json(directory / "generation_config.json")
    declared = generation.get("eos_token_id", config.get("eos_token_id"))
    listed = declared if isinstance(declared, list) else [declared]
    return {i for i in listed if isinstance(i, int) and not isinstance(i, bool)}


def _template_source(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the chat template of chat_template.jinja, or else the (default) one of tokenizer_config.json, if any."""
    file = directory / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise TokenizerError(f"{file} cannot be read as text; get the file again") from None
    stored = settings.get("chat_template")
    if isinstance(stored, list):
        named = {entry.get("name"): entry.get("template") for entry in stored if isinstance(entry, dict)}
        stored = named.get("default")
    return stored if isinstance(stored, str) else None
