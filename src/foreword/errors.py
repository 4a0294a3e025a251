"""The errors that a user can do something about."""


class ForewordError(Exception):
    """One line that says what is wrong and what to do; the CLI prints it and exits with code 2."""


class ModelSourceError(ForewordError):
    """A model could not be found, fetched or verified."""


class CheckpointError(ForewordError):
    """Model files are damaged, incomplete or of a kind that is not supported."""


class TokenizerError(ForewordError):
    """Text, token ids or a chat template that the tokenizer cannot take."""


class RequestError(ForewordError):
    """A request that cannot be served as asked: its parameters or its length are out of bounds."""


class EngineStopped(ForewordError):  # noqa: N818 - reads as what happened
    """The engine takes no more requests: it is draining, closed, or its thread has died."""
