"""The files of a head: tensors by canonical names, and consistency checks."""

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from foreword.cancellation import check_cancelled
from foreword.errors import CheckpointError
from foreword.models.config import ModelConfig
from foreword.models.formats.checkpoint import PackedTensor, opened_safetensors, row_pieces
from foreword.models.formats.fields import ConfigFields
from foreword.models.formats.hf.checkpoint import read_json_object
from foreword.models.formats.hf.packed import scheme_of, unpacked
from foreword.models.heads.names import (
    OUR_NAMES,
    OURS,
    OUTPUT,
    PACKED,
    PARTS,
    SCALE,
    SHAPE,
    canonical_names,
    spread_boundaries,
    usual_boundaries,
)
from foreword.models.heads.spec import HeadSpec, Join, Shapes

PICKLES = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class _Place:
    """Location of a tensor."""

    file: Path
    name: str
    shape: tuple[int, ...]


class PackedMatrix(NamedTuple):
    """A matrix of an 8-bit head."""

    levels: Tensor  # int8 [rows, columns]
    scales: Tensor  # float16 [rows, groups]
    group: int  # columns with one scale


class HeadFiles:
    """Config and tensors of one head; tensors are read on demand."""

    _rows: slice | None = None  # rows that are read; None: all

    def __init__(self, path: Path) -> None:
        """`path` is a directory, or a safetensors file next to its config.json."""
        self.path = path
        folder = path if path.is_dir() else path.parent
        self._places = _with_packed(_places(_safetensors(path)))
        self.config: Mapping[str, Any] = read_json_object(folder / "config.json", "a draft head")

    @property
    def fields(self) -> ConfigFields:
        return ConfigFields(self.config, str(self.path / "config.json"))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor -> shape, by speculators' names, without scales and other parts of rounded matrices."""
        return {name: place.shape for name, place in self._places.items() if not self._is_part(name)}

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Load a tensor in `dtype`, dequantised; raise `CheckpointError` if it is not finite.

        Raises if loading was cancelled.
        """
        check_cancelled()
        stored = self._floats(name)
        self._check_finite(name, stored)
        return stored.to(dtype)

    def _check_finite(self, name: str, stored: Tensor) -> None:
        if not bool(stored.sum(dtype=torch.float32).isfinite()):
            raise CheckpointError(
                f"{self.path}: tensor {name} holds NaN or infinity; the file is damaged, get it again"
            )

    def _floats(self, name: str) -> Tensor:
        """Return a tensor's numbers, rounded ones multiplied by their scales."""
        stored = self.stored(name)
        parts = [name + end for end in PARTS if name + end in self._places]
        if parts:
            return self._unpacked(name, stored, parts)
        if not stored.dtype.is_floating_point or stored.element_size() == 1:
            kind = str(stored.dtype).removeprefix("torch.")
            raise CheckpointError(f"{self.path}: tensor {name} has type {kind}, not floats; use another head")
        return stored

    def _unpacked(self, name: str, stored: Tensor, names: list[str]) -> Tensor:
        """Dequantise a matrix of our own heads, or of a module in a quantised checkpoint."""
        section = self.config.get("quantization_config") or {}
        if _is_ours(section):
            group = ConfigFields(section, str(self.path)).count("group_size")
            return expanded(stored, self.stored(names[0]), group)
        parts = {part.rpartition(".")[2]: self.stored(part) for part in names} | {"weight": stored}
        scheme = scheme_of(self.fields)
        if scheme is None or not set(scheme.needed) <= parts.keys():
            raise CheckpointError(
                f"{self.path}: tensor {name} has scales of an unknown form; use another head"
            )
        found = unpacked(scheme, parts, name, self.path)
        if self._rows is None and tuple(found.shape) != self._places[name].shape:
            raise CheckpointError(
                f"{self.path}: tensor {name} has shape {tuple(found.shape)}, "
                f"its file says {self._places[name].shape}; get it again"
            )
        return found

    def pieces(self, name: str, rows: int) -> Iterator[Tensor]:
        """Yield a matrix in float32, dequantised, in pieces of at most `rows` rows that are read one by one."""
        count = self._places[name].shape[0]
        parts = [self._places[name + end] for end in (PACKED, SCALE) if name + end in self._places]
        if name + "_scale_inv" in self._places or any(part.shape[:1] != (count,) for part in parts):
            yield from row_pieces(self.load(name), rows)  # scales are not by row, or the file is damaged
            return
        for begin in range(0, count, rows):
            view = copy(self)
            view._rows = slice(begin, min(begin + rows, count))
            yield view.load(name)

    def kept(self, name: str) -> PackedTensor | None:
        """Return a matrix of a quantised checkpoint as stored; None: it must be unpacked, or is not packed."""
        names = [name + end for end in PARTS if name + end in self._places]
        if not names or _is_ours(self.config.get("quantization_config")):
            return None  # a config copied from the target may name a scheme that these floats do not have
        if (scheme := scheme_of(self.fields)) is None:
            return None
        parts = {part.rpartition(".")[2]: self.stored(part) for part in names}
        kept = scheme.keep(parts) if set(scheme.needed) <= parts.keys() else None
        return kept if kept is not None and kept.shape == self._places[name].shape else None

    def packed(self, name: str) -> PackedMatrix | None:
        """Return a matrix of our own 8-bit heads as stored; None: it is not one."""
        section = self.config.get("quantization_config") or {}
        if name + SCALE not in self._places or not _is_ours(section):
            return None
        group = ConfigFields(section, str(self.path)).count("group_size")
        found = PackedMatrix(self.stored(name), self.stored(name + SCALE), group)
        self._check_finite(name, found.scales)
        return found

    def stored(self, name: str) -> Tensor:
        place = self._places[name]
        with opened_safetensors(place.file) as file:
            is_part = self._rows is not None and not name.endswith(SHAPE)
            tensor: Tensor = (
                file.get_slice(place.name)[self._rows] if is_part else file.get_tensor(place.name)
            )
        return tensor

    def renamed(self, names: Mapping[str, str]) -> "HeadFiles":
        """Return only these tensors, new name -> name here; parts follow their matrices."""
        view = copy(self)
        parts = {
            new + end: old + end for new, old in names.items() for end in PARTS if old + end in self._places
        }
        view._places = {new: self._places[old] for new, old in {**names, **parts}.items()}
        return view

    def stored_as(self, name: str) -> str:
        return self._places[name].name

    @property
    def bits(self) -> int:
        """Bits per weight of the matrices: 16 where none is rounded."""
        if any(name.endswith(PACKED) for name in self._places):
            return 4
        return 8 if any(map(self._is_part, self._places)) else 16

    def stored_names(self) -> list[str]:
        return sorted(name for name in self._places if name + PACKED not in self._places)

    def _is_part(self, name: str) -> bool:
        return any(name.endswith(end) and name.removesuffix(end) in self._places for end in PARTS)


def _is_ours(section: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(section, Mapping) and section.get("quant_method", OURS) in OUR_NAMES


def expanded(levels: Tensor, scales: Tensor, group: int) -> Tensor:
    """Return float32 [rows, columns] from 8-bit levels; scales [rows, groups], each for `group` columns."""
    spread = scales.float().repeat_interleave(group, dim=1)[:, : levels.shape[1]]
    return levels.float() * spread


def _safetensors(path: Path) -> list[Path]:
    if path.is_file() and path.suffix == ".safetensors":
        return [path]
    if path.is_file() and any(path.match(pattern) for pattern in PICKLES):
        raise pickled(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a head; give a directory with config.json and safetensors")
    files = sorted(path.glob("*.safetensors"))
    if not files and any(any(path.glob(pattern)) for pattern in PICKLES):
        raise pickled(path)
    if not files:
        raise CheckpointError(f"{path} holds no safetensors; give a directory that holds a whole head")
    return files


def pickled(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} holds pickled weights, which can run code and are never loaded; "
        f"`foreword head convert {path} OUT` writes safetensors"
    )


def _places(files: list[Path]) -> dict[str, _Place]:
    found: dict[str, _Place] = {}
    for path in files:
        with opened_safetensors(path) as file:
            names = canonical_names(file.keys(), str(path))
            for name, stored in names.items():
                found[name] = _Place(path, stored, tuple(file.get_slice(stored).get_shape()))
    return found


def _with_packed(places: dict[str, _Place]) -> dict[str, _Place]:
    """Add `x.weight` for every `x.weight_packed`, with the shape of the matrix."""
    found = dict(places)
    for name, place in places.items():
        whole = name.removesuffix(PACKED)
        if whole != name and whole + SHAPE in places:
            shape = places[whole + SHAPE]
            with opened_safetensors(shape.file) as file:
                sizes = file.get_tensor(shape.name).tolist()
            found[whole] = _Place(place.file, place.name, tuple(sizes))
    return found


def checked_shapes(files: HeadFiles, required: Shapes, optional: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the tensors' shapes; raise `CheckpointError` for wrong, missing or extra ones."""
    present = files.shapes
    expected = {**required, **optional}
    missing, surplus = sorted(required.keys() - present.keys()), sorted(present.keys() - expected.keys())
    for what, names in (("lacks", missing), ("has unknown", surplus)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"{files.path} {what} tensor {names[0]}{more}: the head does not fit its own config; get it again"
            )
    for name, shape in present.items():
        if shape != expected[name]:
            raise CheckpointError(
                f"{files.path}: tensor {name} has shape {shape}, its config says {expected[name]}; get it again"
            )
    return present


def vocabulary_shapes(vocab: int, draft_vocab: int, hidden: int) -> tuple[Shapes, Shapes]:
    """Return (required, optional) tensors of embedding and output: a reduced vocabulary needs a table."""
    table: Shapes = {"d2t": (draft_vocab,)}
    rest = {OUTPUT: (draft_vocab, hidden), "embed_tokens.weight": (vocab, hidden), "t2d": (vocab,)}
    return (table, rest) if draft_vocab < vocab else ({}, {**table, **rest})


def fitted(spec: HeadSpec, target: ModelConfig, origin: str) -> HeadSpec:
    """Return the head with its tapped layers for this target; raise `CheckpointError` if it does not fit."""
    _require(spec.target_hidden_size, target.hidden_size, "hidden size", origin)
    _require(spec.vocab_size, target.vocab_size, "vocabulary", origin)
    borrowed = [name for name in ("embed_tokens.weight", OUTPUT) if not spec.has(name)]
    if borrowed and spec.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{origin} lacks tensor {borrowed[0]} and cannot use the target's: it is {spec.hidden_size} wide and "
            f"the target {target.hidden_size}; get the head again"
        )
    boundaries = spec.boundaries
    if spec.reads_normed:
        boundaries = (target.num_layers,)
    elif boundaries is None and spec.join is Join.CONTEXT:
        boundaries = spread_boundaries(target.num_layers, spec.num_taps)
    elif boundaries is None:
        boundaries = usual_boundaries(target.num_layers)
        if spec.num_taps != len(boundaries):
            raise CheckpointError(
                f"{origin} reads {spec.num_taps} hidden states of the target and does not say which; "
                "put eagle_aux_hidden_state_layer_ids into its config.json"
            )
    wrong = [b for b in boundaries if not 0 <= b <= target.num_layers]
    if wrong:
        raise CheckpointError(
            f"{origin} reads the target after layer {wrong[0]} and it has {target.num_layers}; use another head"
        )
    return replace(spec, boundaries=boundaries)


def _require(own: int, wanted: int, what: str, origin: str) -> None:
    if own != wanted:
        raise CheckpointError(
            f"{origin} was made for a {what} of {own} and this model's is {wanted}; use a head for this model"
        )


def draft_token_ids(spec: HeadSpec, files: HeadFiles) -> Tensor | None:
    """Return the target's id of each draft token, int64 [draft vocabulary]; None: identical.

    The file has offsets: token i of the head is token i + d2t[i] of the target.
    """
    if "token_map" in files:  # vLLM's Medusa heads store the ids
        ids: Tensor = files.stored("token_map").long()
    elif "d2t" in files:
        ids = torch.arange(spec.draft_vocab_size) + files.stored("d2t").long()
    else:
        return None
    in_range = int(ids.min()) >= 0 and int(ids.max()) < spec.vocab_size
    if not in_range or int(torch.bincount(ids).max()) > 1:
        raise CheckpointError(
            f"{files.path}: d2t or token_map leads outside the vocabulary of {spec.vocab_size} or twice to the same "
            "token; the file is damaged, get it again"
        )
    if "t2d" in files:
        kept = files.stored("t2d").bool()
        if int(kept.sum()) != len(ids) or not bool(kept[ids].all()):
            raise CheckpointError(f"{files.path}: d2t and t2d name different tokens; get the head again")
    is_whole = len(ids) == spec.vocab_size and bool((ids.diff() == 1).all())
    return None if is_whole else ids
