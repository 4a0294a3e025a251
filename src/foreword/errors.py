"""Errors for users."""

import re
from collections.abc import Iterator
from contextlib import contextmanager


class ForewordError(Exception):
    """A one-line message about what is wrong and what to do; the CLI prints it and exits with `exit_code`."""

    exit_code = 2


class ModelSourceError(ForewordError):
    """A model could not be found, fetched or verified."""


class CheckpointError(ForewordError):
    """Model files are damaged, incomplete or unsupported."""


class TokenizerError(ForewordError):
    """Text, token ids or a chat template are invalid for the tokenizer."""


class RequestError(ForewordError):
    """A request cannot be served: its parameters or its length are out of bounds."""

    def __init__(self, message: str = "", param: str | None = None) -> None:
        """`param` is the request field at fault, if it is a single one."""
        super().__init__(message)
        self.param = param


@contextmanager
def refusing(param: str) -> Iterator[None]:
    """Add `param` to request errors raised within the block that name no field."""
    try:
        yield
    except RequestError as error:
        error.param = error.param or param
        raise


class AddressTaken(RequestError):  # noqa: N818 - reads as what is the case
    """The address is in use, possibly only temporarily; a retry may succeed."""

    exit_code = 1


class EngineStopped(ForewordError):  # noqa: N818 - reads as what happened
    """The engine takes no more requests: it is draining, closed, or its thread has died."""


class EngineUnavailable(ForewordError):  # noqa: N818 - reads as what is the case
    """No engine can answer now; the same request may succeed later."""


# Messages of pydantic (JSON fields and, through typer, options), and their replacements after the field's name.
_PLAIN = [
    (re.compile(pattern), words)
    for pattern, words in (
        (r"Field required", "is missing"),
        (r"Extra inputs are not permitted", "is not known here; leave it out"),
        (r"Input should be a valid integer.*", "must be a whole number"),
        (r"Input should be a (?:valid|finite) number.*", "must be a number"),
        (r"Input should be a valid boolean.*", "must be true or false"),
        (r"Input should be a valid string.*", "must be a text"),
        (r"Input should be a valid list.*", "must be a list"),
        (r"Input should be a valid dictionary.*", "must be an object"),
        (r"Input should be greater than or equal to (\S+)", r"must be at least \1"),
        (r"Input should be less than or equal to (\S+)", r"must be at most \1"),
        (r"(?:String|List) should have at least 1 (?:character|item).*", "must not be empty"),
        (r"String should have at (least|most) (\d+) characters?.*", r"must have at \1 \2 characters"),
        (r"List should have at (least|most) (\d+) items?.*", r"must have at \1 \2 entries"),
        (r"Input should be (.*)", r"must be \1"),
        (r"Value error, (.*)", r"\1"),
    )
]


def in_plain_words(complaint: str) -> str:
    """Rephrase a validation message, to follow the name of the field or option."""
    for pattern, words in _PLAIN:
        if found := pattern.fullmatch(complaint):
            return found.expand(words)
    return complaint
