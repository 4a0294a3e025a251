"""From a path to an opened model."""

from pathlib import Path

from foreword.errors import CheckpointError
from foreword.models.formats.checkpoint import ModelFile


def open_checkpoint(path: Path) -> ModelFile:
    """Open a `.gguf` file or a Hugging Face directory; the weights are read later, by name."""
    if path.is_dir():
        from foreword.models.formats.hf.checkpoint import HfCheckpoint

        return HfCheckpoint(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a .gguf file or a model directory")
    if path.suffix.lower() == ".gguf":
        from foreword.models.formats.gguf.checkpoint import GgufCheckpoint

        return GgufCheckpoint(path)
    raise CheckpointError(
        f"{path} is neither a .gguf file nor a directory; give one of those (safetensors: the directory)"
    )
