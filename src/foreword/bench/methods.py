"""Drafters to measure: parses --methods, and offers them to the engine of a benchmark."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from foreword.bench.skeleton import PLAIN
from foreword.drafters.config import SpeculationConfig, SpeculationSetting
from foreword.drafters.registry import drafter_kinds
from foreword.errors import RequestError
from foreword.paths import user_path

if TYPE_CHECKING:  # methods are checked before heavy imports
    from foreword.engine.llm import LLM


@dataclass(frozen=True)
class Method:
    """A drafter with its settings."""

    label: str  # short and unique
    config: Mapping[str, Any] | None  # parsed by `SpeculationConfig`; None: the engine's default


RANDOM = "random"  # the `model` of a head with random weights
DEFAULT = Method("default", None)
"""The default drafter under the default policy, as in `generate`, `chat` and `serve`."""


def default_methods(without: str | None = None) -> list[Method]:
    """Return every drafter without required settings, except those that follow the request field `without`."""
    return [
        _method({"method": name})
        for name, kind in drafter_kinds().items()
        if _is_complete(kind.settings) and kind.traits.follows != without
    ]


def request_config(method: Method, llm: "LLM", folder: Path) -> Mapping[str, Any]:
    """Return the method's speculation setting for requests; it drafts at every step unless its config says otherwise.

    A head with random weights is written into `folder`.
    """
    if method.config is not None and method.config.get("model") == RANDOM:
        from foreword.bench.random_heads import write_random_head

        (name,) = SpeculationConfig.parse(method.config).method
        path = folder / name
        if not path.exists():
            write_random_head(name, llm.engine.target.config, path)
        return {"fixed": True, **method.config, "model": str(path)}
    if method.config is not None:
        return {"fixed": True, **method.config}
    choice = llm.loaded.choose_speculation("auto")
    if choice.config is None:
        raise RequestError(f"speculation is off by default here: {choice.reason}")
    return choice.config.as_mapping()


Settings = TypeVar("Settings")


class MethodBench(Generic[Settings]):
    """Base of benchmarks that compare methods on a model."""

    def __init__(self, llm: "LLM", methods: Sequence[Method], settings: Settings) -> None:
        self._llm = llm
        if llm.engine.kernels is not None:
            llm.engine.kernels.are_awaited = True  # a head drafts nothing until its kernels are loaded
        self._settings = settings
        # For random heads; removed when this object is.
        self._folder = TemporaryDirectory(prefix="foreword-heads-")
        folder = Path(self._folder.name)
        configs = {method.label: request_config(method, llm, folder) for method in methods}
        llm.offer([SpeculationConfig.parse(config) for config in configs.values()])
        self._speculation: dict[str, SpeculationSetting] = {PLAIN: False, **configs}
        self._name = secrets.token_hex(4)  # unique, so that earlier benchmarks have no influence


def is_random(label: str) -> bool:
    """Return whether this label is that of a head with random weights."""
    return f"model={RANDOM}" in label.split()


def parse_methods(text: str) -> list[Method]:
    """Parse comma-separated names and JSON objects: `ngram,{"method": "suffix"},a+b,default`; `a+b` combines both."""
    methods = []
    unread = text.strip()
    while unread:
        config, unread = _first(unread)
        methods.append(DEFAULT if config == {"method": DEFAULT.label} else _method(config))
        if unread and not unread.startswith(","):
            raise RequestError(f"--methods: a comma is missing before {unread[:20]!r}")
        unread = unread[1:].strip()
    labels = [method.label for method in methods]
    if not methods or len(set(labels)) != len(labels):
        raise RequestError("--methods needs at least one drafter, and each of them once")
    return methods


def _first(text: str) -> tuple[Mapping[str, Any], str]:
    """Return the config of the first method of a list, and the unread text after it."""
    if text.startswith("{"):
        try:
            config, end = json.JSONDecoder().raw_decode(text)
        except json.JSONDecodeError as error:
            raise RequestError(f"--methods is neither names nor JSON: {error}") from None
        return config, text[end:].strip()
    name, comma, unread = text.partition(",")
    names = [part.strip() for part in name.split("+")]
    return {"method": names if len(names) > 1 else names[0]}, comma + unread.strip()


def _method(config: Mapping[str, Any]) -> Method:
    """Return the method of a config, labelled by its names and settings; raise `RequestError` if invalid."""
    if config.get("model") == RANDOM and not isinstance(config.get("method"), str):
        raise RequestError(
            '--methods: a random model needs its method: {"method": "eagle3", "model": "random"}'
        )
    methods = SpeculationConfig.parse(config).method  # refuse invalid methods before loading
    settings = [f"{key}={_short(value)}" for key, value in config.items() if key != "method"]
    return Method(" ".join(["+".join(methods), *settings]), config)


def _short(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return a setting as labels show it; an existing path is shortened to its last component."""
    if isinstance(value, str) and "/" in value and user_path(value).exists():
        return Path(value).name
    return value


def _is_complete(settings: type) -> bool:
    """Return whether a drafter works with the defaults of this dataclass of settings, without a model of its own."""
    known = fields(settings)
    has_defaults = all(f.default is not MISSING or f.default_factory is not MISSING for f in known)
    return has_defaults and "model" not in {field.name for field in known}
