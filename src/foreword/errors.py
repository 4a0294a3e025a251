"""The errors that a user can do something about."""

import re
from collections.abc import Iterator
from contextlib import contextmanager


class ForewordError(Exception):
    """One line that says what is wrong and what to do; the CLI prints it and exits with this code."""

    exit_code = 2


class ModelSourceError(ForewordError):
    """A model could not be found, fetched or verified."""


class CheckpointError(ForewordError):
    """Model files are damaged, incomplete or of a kind that is not supported."""


class TokenizerError(ForewordError):
    """Text, token ids or a chat template that the tokenizer cannot take."""


class RequestError(ForewordError):
    """A request that cannot be served as asked: its parameters or its length are out of bounds."""

    def __init__(self, message: str = "", param: str | None = None) -> None:
        """`param` is the field of the request that is wrong, where one field alone is."""
        super().__init__(message)
        self.param = param


@contextmanager
def refusing(param: str) -> Iterator[None]:
    """Name `param` in the errors of requests that are raised inside and name no field."""
    try:
        yield
    except RequestError as error:
        error.param = error.param or param
        raise


class AddressTaken(RequestError):  # noqa: N818 - reads as what is the case
    """Somebody else listens there, who may be gone later: to try again is no use only for what is wrong by itself."""

    exit_code = 1


class EngineStopped(ForewordError):  # noqa: N818 - reads as what happened
    """The engine takes no more requests: it is draining, closed, or its thread has died."""


class EngineUnavailable(ForewordError):  # noqa: N818 - reads as what is the case
    """There is no engine that could answer now; the same request may succeed later."""


# What pydantic says, of JSON fields and (through typer) of options, and what a user should read after the name.
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
    """What the validation library says, to be read after the name of the field or option."""
    for pattern, words in _PLAIN:
        if found := pattern.fullmatch(complaint):
            return found.expand(words)
    return complaint
