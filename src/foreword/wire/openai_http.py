"""Client side of OpenAI's HTTP API: addresses, connections, models, errors and server-sent events."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx2

from foreword.errors import RequestError

MODELS_TIMEOUT = 30.0  # seconds to wait for the list of models
MOST_ERROR_BYTES = 65_536  # maximum bytes of an error response that are read
CONNECT_TIMEOUT = 30.0  # seconds to connect; the caller limits the time of answers


def base_address(url: str) -> str:
    """Return the server's address without a trailing /v1."""
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is not a number
        is_usable = False
    if not is_usable or parts.query or parts.fragment:
        raise RequestError("--url must be the server's address, such as http://127.0.0.1:8000")
    if "@" in parts.netloc:
        raise RequestError("--url must not hold a password: give a key with --api-key")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def open_client(
    address: str, api_key: str | None, transport: httpx2.AsyncBaseTransport | None = None
) -> httpx2.AsyncClient:
    """Create a client without a connection limit, and without proxies and credentials from the environment."""
    headers = {"Accept-Encoding": "identity"}  # compression would delay chunks
    if api_key:
        if not (api_key.isascii() and api_key.isprintable()):
            raise RequestError("--api-key must be printable ASCII")
        headers["Authorization"] = f"Bearer {api_key}"
    return httpx2.AsyncClient(
        base_url=address,
        headers=headers,
        timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
        transport=transport,
    )


@dataclass(frozen=True)
class ListedModel:
    """A model in the server's list."""

    name: str
    owner: str | None = None  # the field `owned_by`

    @property
    def has_continuous_usage(self) -> bool:
        """Whether the server reports token counts with every chunk."""
        return self.owner in ("foreword", "vllm")


async def listed_model(client: httpx2.AsyncClient, name: str = "") -> ListedModel:
    """Return the model of this name, even if the server does not list it; without a name, the first model."""
    try:
        models = await _models(client)
    except RequestError:
        if not name:
            raise
        models = []
    return next((model for model in models if not name or model.name == name), ListedModel(name))


async def _models(client: httpx2.AsyncClient) -> list[ListedModel]:
    """Return the server's list of models; raise `RequestError` if there is none."""
    try:
        response = await client.get("/v1/models", timeout=MODELS_TIMEOUT)
    except httpx2.HTTPError as error:
        raise RequestError(f"no server answers at {client.base_url}: {error_words(error)}") from None
    if response.status_code != 200:
        needs_key = response.status_code in (401, 403)
        advice = "give a key with --api-key" if needs_key else "name the model with --model"
        raise RequestError(f"{response.url} answers {response.status_code}: {advice}")
    try:
        listed = [ListedModel(entry["id"], entry.get("owned_by")) for entry in response.json()["data"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        listed = []
    models = [model for model in listed if isinstance(model.name, str)]
    if not models:
        raise RequestError(f"{response.url} names no model: name it with --model")
    return models


async def refusal_of(response: httpx2.Response) -> str:
    """Return the server's error message. The body is read to its end, so that the connection can be reused."""
    body = b""
    async for received in response.aiter_bytes():
        body += received
        if len(body) > MOST_ERROR_BYTES:
            break
    try:
        error = json.loads(body)["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError, RecursionError):
        message = response.reason_phrase
    return " ".join(str(message).split())[:200]


def error_words(error: Exception) -> str:
    """Return an exception's type and message; some of httpx have no message."""
    return f"{type(error).__name__} {error}".strip()


class EventParser:
    """Splits a byte stream into the data of server-sent events."""

    MOST_BYTES = 16 * 2**20  # maximum size of an event, so that an endless line does not fill the memory

    def __init__(self) -> None:
        self._line = b""  # start of a line whose end has not arrived
        self._data: list[bytes] = []  # data lines of the incomplete event
        self._data_bytes = 0  # size of these lines

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Yield the data of every completed event; other fields are skipped."""
        if self._data_bytes + len(self._line) + len(received) > self.MOST_BYTES:
            raise ValueError(f"an event has more than {self.MOST_BYTES} bytes")
        *lines, self._line = (self._line + received).split(b"\n")
        for line in lines:
            yield from self._take(line.removesuffix(b"\r"))

    def _take(self, line: bytes) -> Iterator[bytes]:
        """Process a line; yield the data of the event that an empty line ends."""
        if not line:
            if self._data:
                yield b"\n".join(self._data)
            self._data, self._data_bytes = [], 0
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(line) + 1
        elif name not in (b"", b"event", b"id", b"retry"):  # an empty name is a comment
            raise ValueError(f"not a line of an event stream: {line[:60]!r}")
