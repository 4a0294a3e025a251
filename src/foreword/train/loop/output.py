"""Writes the result of a training: files, a model card, and pieces for transfer."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file
from torch import Tensor

from foreword.errors import RequestError
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.formats.hf.packed import unpack_words
from foreword.models.heads.files import expanded
from foreword.models.heads.names import OUTPUT, PACKED, SCALE, SHAPE
from foreword.models.heads.opening import output_rows
from foreword.models.heads.writing import GROUP, ROUNDED_BITS, rounded_parts
from foreword.train.files import (
    MANIFEST,
    WEIGHTS,
    atomic_path,
    identity_of,
    require_export_directory,
    require_new,
    write_json,
    write_tensors,
    write_text,
)
from foreword.train.heads.learner import LearnedFiles
from foreword.train.loop.evaluate import TauReport

CARD = "README.md"
PIECE_BYTES = 15_000_000  # maximum size of a piece


def write_output(directory: Path, files: LearnedFiles) -> str:
    """Write a trained directory, config.json last, which marks it as complete; return the SHA-256 of its weights."""
    config = directory / "config.json"
    config.unlink(missing_ok=True)
    metadata = {"format": "pt", "borrowed": json.dumps(sorted(files.borrowed))}
    write_tensors(directory / WEIGHTS, files.tensors, metadata)
    for name, text in files.texts.items():
        write_text(directory / name, text)
    write_json(config, files.config)
    return digest_of(directory / WEIGHTS)


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_pieces(source: Path, out: Path, *, bits: int = 16, model: str = "") -> list[Path]:
    """Write a trained directory as files of at most 15 MB, without tensors of the target.

    With 8 or 4 bits, matrices are rounded as by `foreword head quantize`. `join_pieces` restores the directory. It
    needs the target whose `identity_of` is `model`, or any target if `model` is empty.
    """
    require_export_directory(out, source)
    tensors, borrowed = _read(source / WEIGHTS)
    trained = {name: tensor for name, tensor in tensors.items() if name not in borrowed}
    if bits in ROUNDED_BITS:
        trained = _rounded(trained, bits)
    joined = out / WEIGHTS  # exists only until it is cut into pieces
    write_tensors(joined, trained, {"format": "pt"})
    paths = _write_pieces_of(joined)
    texts = [path for path in sorted(source.iterdir()) if path.suffix in (".json", ".md", ".jinja")]
    manifest = {
        "pieces": [path.name for path in paths],
        "sha256": digest_of(joined),
        "source": digest_of(source / WEIGHTS),
        "bits": bits,
        "model": model,
        "borrowed": sorted(borrowed),
        "files": {path.name: path.read_text(encoding="utf-8") for path in texts if _is_small(path)},
        "from_target": [path.name for path in texts if not _is_small(path)],
    }
    joined.unlink()
    write_json(out / MANIFEST, manifest)
    for stale in set(out.glob(f"{WEIGHTS}.*")) - set(paths):  # of an earlier, larger export
        stale.unlink()
    return [*paths, out / MANIFEST]


def _is_small(path: Path) -> bool:
    """Return whether a text file is stored in the manifest. Larger ones are the tokenizer's, which the target has."""
    return path.stat().st_size < 1 << 20


def join_pieces(pieces: Path, out: Path, checkpoint: Checkpoint) -> None:
    """Restore a trained directory from its pieces and the target's tensors."""
    require_new(out)
    manifest = _manifest(pieces)
    paths = [pieces / Path(name).name for name in manifest["pieces"]]
    if missing := [path for path in paths if not path.exists()]:
        raise RequestError(f"{missing[0]} is missing; copy all pieces that {MANIFEST} names")
    data = b"".join(path.read_bytes() for path in paths)
    if hashlib.sha256(data).hexdigest() != manifest["sha256"]:
        raise RequestError(
            f"the pieces in {pieces} are damaged, or {MANIFEST} is of another export; copy all files again"
        )
    if manifest.get("model") and manifest["model"] != identity_of(checkpoint):
        raise RequestError(f"the pieces in {pieces} were trained for another model; name it by --model")
    tensors = _in_16_bits(load(data))
    borrowed = {name: _borrowed(name, tensors, checkpoint) for name in manifest["borrowed"]}
    files = dict(manifest["files"])
    config = json.loads(files.pop("config.json"))
    if manifest["from_target"]:
        from foreword.train.heads.config_files import tokenizer_files

        files |= tokenizer_files(checkpoint.tokenizer())
    card = files.pop(CARD, "")
    digest = write_output(out, LearnedFiles(config, tensors | borrowed, files, frozenset(borrowed)))
    if card:
        bits = manifest["bits"]
        rounding = f" (rounded to {bits} bits)" if bits in ROUNDED_BITS else ""
        write_text(out / CARD, card.replace(f"`{manifest['source']}`", f"`{digest}`{rounding}"))


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the dequantised tensors of a trained directory's file."""
    return _in_16_bits(_read(path)[0])


def _read(path: Path) -> tuple[dict[str, Tensor], frozenset[str]]:
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise RequestError(f"{path} cannot be read ({' '.join(str(error).split())})") from None
    return tensors, frozenset(json.loads(metadata.get("borrowed", "[]")))


def _write_pieces_of(file: Path) -> list[Path]:
    """Write the bytes of a file as numbered files of at most `PIECE_BYTES`; return their paths."""
    paths = []
    data = file.read_bytes()
    for number, begin in enumerate(range(0, len(data), PIECE_BYTES)):
        path = file.with_name(f"{file.name}.{number:02d}")
        with atomic_path(path) as partial:
            partial.write_bytes(data[begin : begin + PIECE_BYTES])
        paths.append(path)
    return paths


def _manifest(pieces: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((pieces / MANIFEST).read_text(encoding="utf-8"))
        if not {"pieces", "sha256", "source", "bits", "borrowed", "files", "from_target"} <= manifest.keys():
            raise ValueError
    except (OSError, ValueError, AttributeError):
        raise RequestError(
            f"{pieces} has no valid {MANIFEST}; give a directory that --export wrote"
        ) from None
    return manifest


def _borrowed(name: str, tensors: Mapping[str, Tensor], checkpoint: Checkpoint) -> Tensor:
    """Load a tensor of the target; with a draft vocabulary, only these tokens' rows of the output matrix."""
    if name != OUTPUT or "d2t" not in tensors:
        return checkpoint.load(name, torch.bfloat16)
    token_ids = tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
    return output_rows(checkpoint, token_ids, torch.bfloat16)


def _rounded(tensors: dict[str, Tensor], bits: int) -> dict[str, Tensor]:
    """Return the tensors with every matrix replaced by its quantised form."""
    rounded: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        is_matrix = tensor.ndim == 2 and tensor.dtype.is_floating_point
        rounded |= rounded_parts(name, tensor.float(), bits) if is_matrix else {name: tensor}
    return rounded


def _in_16_bits(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with every quantised matrix as bfloat16."""
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        matrix = name.removesuffix(PACKED)
        if matrix != name:  # stored in 4 bits
            packed = {f"weight{suffix}": tensors[matrix + suffix] for suffix in (PACKED, SCALE, SHAPE)}
            plain[matrix] = unpack_words(packed, 4).bfloat16()
        elif name + SCALE in tensors:  # stored in 8 bits
            plain[name] = expanded(tensor, tensors[name + SCALE], GROUP).bfloat16()
        elif not name.endswith((SCALE, SHAPE)):
            plain[name] = tensor
    return plain


_NAMES = {
    "eagle3": ("An EAGLE-3 head", "eagle3"),
    "medusa": ("Medusa heads", "medusa"),
    "dflash": ("A DFlash head", "dflash"),
    "dflash2": ("A DFlash2 head", "dflash2"),
    "draft": ("A draft model", "draft_model"),
    "exit": ("An early exit", "layer_skip"),
}
"""Description, and the speculation method that runs the result, by training method."""


def drafter_config(method: str, directory: str) -> dict[str, str]:
    """Return the configuration that drafts with the result of a training method."""
    return {"method": _NAMES[method][1], "adapter" if method == "exit" else "model": directory}


def write_card(
    directory: Path,
    method: str,
    *,
    target: str,
    sha256: str,
    data: Sequence[str],
    training: str,
    command: str,
    measured: Mapping[str, TauReport],
) -> None:
    """Write the model card to README.md.

    `target` is the target's name, `sha256` the checksum of the weights, `measured` has reports by set of texts. `data`
    and `training` are sentences.
    """
    title = _NAMES[method][0]
    lines = [
        f"# {title} for {target}",
        "",
        f"Use it with `--speculation '{json.dumps(drafter_config(method, 'DIRECTORY'))}'`. It drafts; the model "
        "decides: it cannot change a text.",
        "",
        f"- **File**: `model.safetensors`, SHA-256 `{sha256}`.",
        f"- **Data**: {' '.join(data)}",
        f"- **Training**: {training}",
        "",
        "  ```console",
        f"  $ {command}",
        "  ```",
        "",
    ]
    for name, report in measured.items():
        lines += [
            f"- **Tokens per pass**, {name}, greedy chains of {report.depth} draft tokens; the first is right in "
            f"{report.first_hit:.1%} of all places:",
            "",
            "  | kind | τ |",
            "  | --- | ---: |",
            f"  | all | {report.tau():.2f} |",
            *(f"  | {kind} | {tau:.2f} |" for kind, tau in report.by_kind().items()),
            "",
        ]
    write_text(directory / CARD, "\n".join(lines))
