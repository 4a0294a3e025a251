"""Who runs the files that a user has named."""

from foreword.drafters.names import OWN_METHODS
from foreword.errors import RequestError
from foreword.models.heads.files import HeadFiles
from foreword.models.heads.layouts.common import head_kind
from foreword.models.sources.resolve import resolve_model


def method_of(model: str) -> str:
    """The method that runs these files: a head's own, else that of a smaller model. Only their names are read."""
    path = resolve_model(model)
    if path.suffix == ".gguf":
        return "draft_model"
    kind = head_kind(HeadFiles(path).shapes)
    if kind is not None and kind not in OWN_METHODS:
        raise RequestError(f"speculation: {path} holds a {kind} head, and there is no method that runs it")
    return kind or "draft_model"
