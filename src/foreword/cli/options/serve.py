"""Options of HTTP servers, checked before anything heavy is imported."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from foreword.cli.options.common import split_list
from foreword.cli.options.grouped import flag, option
from foreword.errors import RequestError
from foreword.paths import user_path

if TYPE_CHECKING:
    from foreword.server.settings import Address

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class ServeCommand(TyperCommand):
    """Accepts several adapters after one option, and the model as `--model`, as vLLM does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - typer's own click's
        return super().parse_args(ctx, positional("--model", repeated("--lora-modules", args)))


def positional(option: str, args: list[str]) -> list[str]:
    """Turn `OPTION VALUE` and `OPTION=VALUE` into `VALUE`. An option without a value is refused later."""
    read = [arg.removeprefix(f"{option}=") for arg in args if arg != option]
    return read if args[-1:] != [option] else [*read, option]


def repeated(option: str, args: list[str]) -> list[str]:
    """Repeat the option before each of its pairs: `OPTION a=x b=y`."""
    read: list[str] = []
    is_value = takes_more = False  # whether `arg` is the option's value, and whether it may be a further pair
    for arg in args:
        if takes_more and "=" in arg and not arg.startswith("-"):
            read += [option, arg]
            continue
        read.append(arg)
        takes_more = is_value or arg.startswith(f"{option}=")
        is_value = arg == option
    return read


def memory_size(option: str, text: str) -> int:
    """Parse a number of bytes, with K, M, G or T for powers of 1024."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    size = int(float(parts[1]) * _UNITS[parts[2]]) if parts else 0
    if size < 1:
        raise RequestError(f"{option} takes a number of bytes such as 2G or 512M, not {text!r}")
    return size


def api_keys(given: list[str] | None) -> tuple[str, ...]:
    """Return the keys of `--api-key`, or of the environment."""
    return _keys("--api-key", "FOREWORD_API_KEY", given)


def admin_keys(given: list[str] | None, client_keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys of `--admin-key`, or of the environment; `client_keys` are those of `--api-key`."""
    keys = _keys("--admin-key", "FOREWORD_ADMIN_KEY", given)
    if set(keys) & set(client_keys):
        raise RequestError("an admin key is also an API key; give --admin-key a key of its own")
    return keys


def _keys(option: str, variable: str, given: list[str] | None) -> tuple[str, ...]:
    keys = tuple(given or os.environ.get(variable, "").split(","))
    stripped = tuple(key.strip() for key in keys if key.strip())
    if given and len(stripped) != len(given):
        raise RequestError(f"a key of {option} is empty; leave {option} out or give one")
    return stripped


def client_key(given: str | None) -> str:
    """Return a client's key: the given one, or the first of the environment."""
    return given or os.environ.get("FOREWORD_API_KEY", "").split(",")[0]


def context_words(max_model_len: int, of_model: int, requested: int | None) -> str:
    """Return a server's context length in words, with the option that limits it."""
    if max_model_len >= of_model:
        return f"context {max_model_len:,} tokens"
    reason = "limited by KV memory (--kv-cache-memory-bytes)" if requested is None else "--max-model-len"
    return f"context {max_model_len:,} of {of_model:,} tokens: {reason}"


def origins(option: str | None) -> tuple[str, ...]:
    """Parse the list of `--cors-origins`."""
    allowed = tuple(origin.lower().rstrip("/") for origin in split_list(option))
    for origin in allowed:
        if origin not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@]+", origin):
            raise RequestError(f"--cors-origins takes origins such as https://example.org, not {origin!r}")
    return allowed


def named_paths(option: str, entries: list[str] | None, model_name: str) -> dict[str, str]:
    """Parse entries NAME=PATH; the folders' contents are checked when loaded."""
    paths: dict[str, str] = {}
    for entry in entries or ():
        name, is_pair, path = entry.partition("=")
        if not (name.strip() and is_pair and path.strip()):
            raise RequestError(f"{option} takes NAME=PATH, not {entry!r}")
        if name.strip() in (model_name, *paths):
            raise RequestError(f"{option}: there is a model {name.strip()!r} already; choose another name")
        folder = user_path(path.strip())
        if not folder.is_dir():
            raise RequestError(f"{option}: {folder} is not a directory")
        paths[name.strip()] = str(folder.resolve())
    return paths


def need_server_extra() -> None:
    """Raise `RequestError` if optional packages of the server are missing."""
    try:
        import fastapi  # noqa: F401
        import msgspec  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise RequestError(f"a package is missing ({error.name}): pip install 'foreword[server]'") from None


def port_option(default: int) -> Any:  # noqa: ANN401
    return option(default, "Port to listen on; 0: any.", min=0, max=65535)


@dataclass(frozen=True, kw_only=True)
class ListeningOptions:
    """Address and access options of a server."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = port_option(8000)
    api_key: list[str] | None = option(None, "API key of clients; repeatable. Default: FOREWORD_API_KEY.")
    allowed_hosts: str | None = option(
        None,
        "Allowed Host headers, separated by commas; *: any. Default: this machine's names if it listens on "
        "127.0.0.1, else any.",
    )
    cors_origins: str | None = option(None, "Allowed CORS origins, such as https://example.org; *: all.")
    insecure: bool = flag("Listen beyond this machine without an API key.")
    access_log: bool = flag("Log every request.")
    drain_seconds: float = option(30.0, "Seconds that SIGTERM waits for running answers.", min=0)

    def address(self) -> "Address":
        """Return the address; raise `RequestError` if other machines could use it without an API key."""
        from foreword.server.settings import Address

        address = Address(self.host, self.port)
        address.check(bool(api_keys(self.api_key)), self.insecure)
        return address

    def settings(self) -> dict[str, Any]:
        """Return the fields of `ServerSettings` given by these options."""
        return {
            "api_keys": api_keys(self.api_key),
            "allowed_hosts": self.address().allowed_hosts(split_list(self.allowed_hosts)),
            "cors_origins": origins(self.cors_origins),
            "access_log": self.access_log,
            "drain_seconds": self.drain_seconds,
        }


PolicyOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Policy file (docs/policy.md).")]


def checked_policy(path: Path) -> Path:
    """Return the absolute path of a policy file; raise `RequestError` if its rules are invalid.

    Its drafters are checked when they are created.
    """
    from foreword.control.policy_file.parsing import read_policy

    path = user_path(path).resolve()
    read_policy(path)
    return path
