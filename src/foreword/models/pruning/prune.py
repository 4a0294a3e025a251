"""A model with fewer layers, as files: the natural draft model where there is no smaller partner."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from foreword.errors import RequestError
from foreword.models.formats.hf.checkpoint import HfCheckpoint
from foreword.models.formats.opening import open_checkpoint
from foreword.models.pruning.gguf import write_pruned_gguf
from foreword.models.pruning.hf import write_pruned_directory
from foreword.models.pruning.layers import check_layers_of, spread_layers
from foreword.progress import Progress


def prune(
    model: Path, out: Path, layers: Sequence[int] | int, progress: Progress | None = None
) -> tuple[int, ...]:
    """Write `model` with these layers alone, or this many at even distances, to `out`; return their numbers.

    A GGUF file becomes a GGUF file, a Hugging Face directory a directory, both in the numbers that they have.
    If it fails, nothing is left at `out`.
    """
    source = open_checkpoint(model)
    kept = spread_layers(source.config, layers) if isinstance(layers, int) else layers
    check_layers_of(source.config, kept)
    _check_output(model, out)
    source.tokenizer()  # a copy whose tokenizer cannot be read would be of no use: refused before writing
    with _unfinished(out) as unfinished:
        if isinstance(source, HfCheckpoint):
            write_pruned_directory(source, unfinished, kept, progress)
        else:
            write_pruned_gguf(model, unfinished, kept, progress)
    open_checkpoint(out)  # what was written is whole
    return tuple(kept)


def _check_output(model: Path, out: Path) -> None:
    """Refuse an output that exists, or whose name is not that of the model's format."""
    is_named_gguf = out.suffix.lower() == ".gguf"
    if model.is_file() and not is_named_gguf:
        raise RequestError(f"{model} is a GGUF file and is pruned into another one: name it {out}.gguf")
    if model.is_dir() and is_named_gguf:
        raise RequestError(f"{model} is a directory and is pruned into another one: name one, not {out}")
    if os.path.lexists(out):
        raise RequestError(f"{out} exists already; remove it or name another output")


@contextmanager
def _unfinished(out: Path) -> Iterator[Path]:
    """A place beside `out` to write to, moved there at the end."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        workplace = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise _unwritable(out, error) from None
    try:
        yield workplace / out.name
        (workplace / out.name).rename(out)
    except OSError as error:
        raise _unwritable(out, error) from None
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


def _unwritable(out: Path, error: OSError) -> RequestError:
    return RequestError(f"{out} cannot be written: {error.strerror or error}")
