"""Facts about a model's files, for clients that show them."""

import math
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from foreword.models.formats.checkpoint import ModelFile


@dataclass(frozen=True)
class ModelFiles:
    """Facts about a model's files; the defaults mean unknown."""

    size: int = 0  # bytes
    modified: float = 0.0  # time of the newest file, in seconds since 1970
    digest: str = ""  # hash of names, sizes and times; a hash of the contents would delay the start
    file_format: str = ""  # "gguf" or "safetensors"
    family: str = ""  # architecture, such as "llama"
    weight_format: str = ""  # such as "BF16" or "Q4_K_M"; empty: unknown
    parameters: int = 0  # number of weights
    context_length: int | None = None  # tokens: the model's context, or `max_model_len` if that is shorter

    @classmethod
    def of(cls, checkpoint: "ModelFile", max_model_len: int | None = None) -> Self:
        """Return the facts about an opened model, whose context `max_model_len` may shorten."""
        from foreword.models.layer_shapes import expected_shapes

        path = checkpoint.path
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        stats = {file.name: file.stat() for file in files if file.is_file()}
        longest = checkpoint.config.context_length
        facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]
        return cls(
            size=sum(stat.st_size for stat in stats.values()),
            modified=max((stat.st_mtime for stat in stats.values()), default=0.0),
            digest=sha256(repr(facts).encode()).hexdigest(),
            file_format="safetensors" if path.is_dir() else "gguf",
            family=checkpoint.config.architecture,
            weight_format=checkpoint.weight_format(),
            parameters=sum(math.prod(shape) for shape in expected_shapes(checkpoint.config).values()),
            context_length=min(longest, max_model_len or longest),
        )
