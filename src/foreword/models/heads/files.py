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
    FOREWORD_FORMAT,
    FOREWORD_FORMATS,
    OUTPUT,
    PACKED,
    PART_SUFFIXES,
    SCALE,
    SHAPE,
    canonical_names,
    spread_boundaries,
    usual_boundaries,
)
from foreword.models.heads.spec import HeadSpec, Join, Shapes

_PICKLES = ("*.bin", "*.pt", "*.pth")  # patterns of files with pickled weights


@dataclass(frozen=True)
class _Location:
    """Location of a tensor."""

    file: Path
    name: str  # in the file
    shape: tuple[int, ...]


class PackedMatrix(NamedTuple):
    """A matrix in Foreword's own 8-bit format."""

    levels: Tensor  # int8 [rows, columns]
    scales: Tensor  # float16 [rows, groups]
    group: int  # number of columns that share a scale


class HeadFiles:
    """Config and tensors of one draft head, by canonical names (those of speculators). Tensors are read on demand."""

    _rows: slice | None = None  # the rows that `stored` reads; None: all

    def __init__(self, path: Path) -> None:
        """`path` is a directory, or a safetensors file next to its config.json."""
        self.path = path
        folder = path if path.is_dir() else path.parent
        self._locations = _with_packed(_locations(_safetensors(path)))
        self.config: Mapping[str, Any] = read_json_object(folder / "config.json", "a draft head")

    @property
    def fields(self) -> ConfigFields:
        return ConfigFields(self.config, str(self.path / "config.json"))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor, by name, without the scales and other parts of quantised matrices."""
        return {name: location.shape for name, location in self._locations.items() if not self._is_part(name)}

    def __contains__(self, name: str) -> bool:
        return name in self._locations

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Load a tensor in `dtype`, dequantised; raise if it is not finite, or if loading was cancelled."""
        check_cancelled()
        stored = self._floats(name)
        self._check_finite(name, stored)
        return stored.to(dtype)

    def _check_finite(self, name: str, stored: Tensor) -> None:
        # A sum is NaN or infinite if an element is, and needs no mask as large as the tensor.
        if not bool(stored.sum(dtype=torch.float32).isfinite()):
            raise CheckpointError(
                f"{self.path}: tensor {name} holds NaN or infinity; the file is damaged, get it again"
            )

    def _floats(self, name: str) -> Tensor:
        """Return a tensor as floats; quantised numbers are multiplied by their scales."""
        stored = self.stored(name)
        parts = self._part_names(name)
        if parts:
            return self._unpacked(name, stored, parts)
        is_float8 = stored.element_size() == 1  # meaningless without scales, which this file lacks
        if not stored.dtype.is_floating_point or is_float8:
            kind = str(stored.dtype).removeprefix("torch.")
            raise CheckpointError(f"{self.path}: tensor {name} has type {kind}, not floats; use another head")
        return stored

    def _unpacked(self, name: str, stored: Tensor, names: list[str]) -> Tensor:
        """Dequantise the matrix `stored`; `names` are the tensors with its scales and other parts."""
        section = self.config.get("quantization_config") or {}
        if _is_foreword_format(section):  # then `names` has only the scales
            group = ConfigFields(section, str(self.path)).count("group_size")
            return expanded(stored, self.stored(names[0]), group)
        parts = {part.rpartition(".")[2]: self.stored(part) for part in names} | {"weight": stored}
        scheme = scheme_of(self.fields)
        if scheme is None or not set(scheme.needed) <= parts.keys():
            raise CheckpointError(
                f"{self.path}: tensor {name} has scales of an unknown form; use another head"
            )
        matrix = unpacked(scheme, parts, name, self.path)
        if self._rows is None and tuple(matrix.shape) != self._locations[name].shape:
            raise CheckpointError(
                f"{self.path}: tensor {name} has shape {tuple(matrix.shape)}, "
                f"its file says {self._locations[name].shape}; get it again"
            )
        return matrix

    def pieces(self, name: str, rows: int) -> Iterator[Tensor]:
        """Yield a matrix in float32, dequantised, in pieces of at most `rows` rows; read each piece when needed."""
        count = self._locations[name].shape[0]
        parts = [
            self._locations[name + suffix] for suffix in (PACKED, SCALE) if name + suffix in self._locations
        ]
        if name + "_scale_inv" in self._locations or any(part.shape[:1] != (count,) for part in parts):
            # The scales are not those of rows, or the file is damaged.
            yield from row_pieces(self.load(name), rows)
            return
        for begin in range(0, count, rows):
            view = copy(self)
            view._rows = slice(begin, min(begin + rows, count))
            yield view.load(name)

    def packed_tensor(self, name: str) -> PackedTensor | None:
        """Return a matrix of a quantised head in a form that kernels read; None: plain floats, or another form."""
        names = self._part_names(name)
        if not names or _is_foreword_format(self.config.get("quantization_config")):
            # Without scales the matrix is plain floats. The config may name a scheme, as a copy of the target's.
            return None
        if (scheme := scheme_of(self.fields)) is None:
            return None
        parts = {part.rpartition(".")[2]: self.stored(part) for part in names}
        if not set(scheme.needed) <= parts.keys():
            return None
        matrix = scheme.repack(parts)
        return matrix if matrix is not None and matrix.shape == self._locations[name].shape else None

    def packed_int8(self, name: str) -> PackedMatrix | None:
        """Return a matrix in Foreword's own 8-bit format as stored; None: it is stored in another format."""
        section = self.config.get("quantization_config") or {}
        if name + SCALE not in self._locations or not _is_foreword_format(section):
            return None
        group = ConfigFields(section, str(self.path)).count("group_size")
        matrix = PackedMatrix(self.stored(name), self.stored(name + SCALE), group)
        self._check_finite(name, matrix.scales)
        return matrix

    def stored(self, name: str) -> Tensor:
        """Read a tensor as stored: all of it, or the rows in `_rows`."""
        location = self._locations[name]
        with opened_safetensors(location.file) as file:
            if self._rows is not None and not name.endswith(SHAPE):
                return file.get_slice(location.name)[self._rows]  # type: ignore[no-any-return]
            return file.get_tensor(location.name)  # type: ignore[no-any-return]

    def renamed(self, names: Mapping[str, str]) -> "HeadFiles":
        """Return a view with only these tensors: new name -> name here. Scales and other parts are renamed too."""
        view = copy(self)
        view._locations = {}
        for new, old in names.items():
            for part in (old, *self._part_names(old)):
                view._locations[new + part.removeprefix(old)] = self._locations[part]
        return view

    def _part_names(self, name: str) -> list[str]:
        """Return the names of the scales and other parts of a matrix; empty if it is not quantised."""
        return [name + suffix for suffix in PART_SUFFIXES if name + suffix in self._locations]

    def stored_as(self, name: str) -> str:
        """Return the name of a tensor in its file."""
        return self._locations[name].name

    @property
    def bits(self) -> int:
        """Bits per weight of the matrices: 16 if none is quantised."""
        if any(name.endswith(PACKED) for name in self._locations):
            return 4
        return 8 if any(map(self._is_part, self._locations)) else 16

    def stored_names(self) -> list[str]:
        """Return the names of all tensors in the files, sorted, without those that `_with_packed` has added."""
        return sorted(name for name in self._locations if name + PACKED not in self._locations)

    def _is_part(self, name: str) -> bool:
        """Return whether a tensor is the scales or another part of a quantised matrix."""
        return any(
            name.endswith(suffix) and name.removesuffix(suffix) in self._locations for suffix in PART_SUFFIXES
        )


def _is_foreword_format(section: object) -> TypeGuard[Mapping[str, object]]:
    """Return whether this quantization_config names Foreword's own format."""
    return isinstance(section, Mapping) and section.get("quant_method", FOREWORD_FORMAT) in FOREWORD_FORMATS


def expanded(levels: Tensor, scales: Tensor, group: int) -> Tensor:
    """Dequantise 8-bit levels to float32 [rows, columns]; scales [rows, groups], each for `group` columns."""
    column_scales = scales.float().repeat_interleave(group, dim=1)[:, : levels.shape[1]]
    return levels.float() * column_scales


def _safetensors(path: Path) -> list[Path]:
    """Return the safetensors files of a head; raise `CheckpointError` if there are none."""
    if path.is_file() and path.suffix == ".safetensors":
        return [path]
    if pickled_files(path):
        raise CheckpointError(
            f"{path} holds pickled weights, which can run code and are never loaded; "
            f"`foreword head convert {path} OUT` writes safetensors"
        )
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a head; give a directory with config.json and safetensors")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} holds no safetensors; give a directory that holds a whole head")
    return files


def pickled_files(path: Path) -> list[Path]:
    """Return the files with pickled weights; empty if there are safetensors."""
    if path.is_file():
        return [path] if any(path.match(pattern) for pattern in _PICKLES) else []
    if any(path.glob("*.safetensors")):
        return []
    return sorted(file for pattern in _PICKLES for file in path.glob(pattern))


def _locations(files: list[Path]) -> dict[str, _Location]:
    """Return the locations of all tensors, by canonical name."""
    locations: dict[str, _Location] = {}
    for path in files:
        with opened_safetensors(path) as file:
            names = canonical_names(file.keys(), str(path))
            for name, stored in names.items():
                locations[name] = _Location(path, stored, tuple(file.get_slice(stored).get_shape()))
    return locations


def _with_packed(locations: dict[str, _Location]) -> dict[str, _Location]:
    """Add `x.weight` for every `x.weight_packed`, with the shape of the matrix."""
    result = dict(locations)
    for name, location in locations.items():
        matrix = name.removesuffix(PACKED)
        if matrix != name and matrix + SHAPE in locations:
            shape = locations[matrix + SHAPE]
            with opened_safetensors(shape.file) as file:
                sizes = file.get_tensor(shape.name).tolist()
            result[matrix] = _Location(location.file, location.name, tuple(sizes))
    return result


def checked_shapes(files: HeadFiles, required: Shapes, optional: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the head's tensors; raise `CheckpointError` if one is wrong, missing or unknown."""
    present = files.shapes
    expected = {**required, **optional}
    missing, unknown = sorted(required.keys() - present.keys()), sorted(present.keys() - expected.keys())
    for problem, names in (("lacks", missing), ("has unknown", unknown)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"{files.path} {problem} tensor {names[0]}{more}: the head does not fit its own config; get it again"
            )
    for name, shape in present.items():
        if shape != expected[name]:
            raise CheckpointError(
                f"{files.path}: tensor {name} has shape {shape}, its config says {expected[name]}; get it again"
            )
    return present


def vocabulary_shapes(vocab: int, draft_vocab: int, hidden: int) -> tuple[Shapes, Shapes]:
    """Return the shapes of the required and of the optional embedding, output and vocabulary tensors."""
    d2t: Shapes = {"d2t": (draft_vocab,)}
    optional = {OUTPUT: (draft_vocab, hidden), "embed_tokens.weight": (vocab, hidden), "t2d": (vocab,)}
    if draft_vocab < vocab:  # d2t names the tokens that the head drafts
        return d2t, optional
    return {}, {**d2t, **optional}


def fitted(spec: HeadSpec, target: ModelConfig, origin: str) -> HeadSpec:
    """Return the head with the boundaries that it reads in this target; raise `CheckpointError` if it does not fit."""
    for quantity, of_head, of_target in (
        ("hidden size", spec.target_hidden_size, target.hidden_size),
        ("vocabulary", spec.vocab_size, target.vocab_size),
    ):
        if of_head != of_target:
            raise CheckpointError(
                f"{origin} was made for a {quantity} of {of_head} and this model's is {of_target}; "
                "use a head for this model"
            )
    borrowed = [name for name in ("embed_tokens.weight", OUTPUT) if not spec.has(name)]
    if borrowed and spec.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{origin} lacks tensor {borrowed[0]} and cannot use the target's: it is {spec.hidden_size} wide and "
            f"the target {target.hidden_size}; get the head again"
        )
    boundaries = spec.boundaries
    if spec.reads_normed:  # the states after the final norm, which follows the last layer
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
    outside = [boundary for boundary in boundaries if not 0 <= boundary <= target.num_layers]
    if outside:
        raise CheckpointError(
            f"{origin} reads the target after layer {outside[0]} and it has {target.num_layers}; use another head"
        )
    return replace(spec, boundaries=boundaries)


def draft_token_ids(spec: HeadSpec, files: HeadFiles) -> Tensor | None:
    """Return the target's id i + d2t[i] of each draft token i, int64 [draft vocabulary]; None: the same ids."""
    if "token_map" in files:  # vLLM's Medusa heads store the ids
        ids: Tensor = files.stored("token_map").long()
    elif "d2t" in files:
        ids = torch.arange(spec.draft_vocab_size) + files.stored("d2t").long()
    else:
        return None
    in_range = int(ids.min()) >= 0 and int(ids.max()) < spec.vocab_size
    if not in_range or int(torch.bincount(ids).max()) > 1:
        raise CheckpointError(
            f"{files.path}: d2t or token_map names an id outside the vocabulary of {spec.vocab_size}, or the same id "
            "twice; the file is damaged, get it again"
        )
    if "t2d" in files:
        is_draft_token = files.stored("t2d").bool()
        if int(is_draft_token.sum()) != len(ids) or not bool(is_draft_token[ids].all()):
            raise CheckpointError(f"{files.path}: d2t and t2d name different tokens; get the head again")
    is_identity = len(ids) == spec.vocab_size and bool((ids.diff() == 1).all())
    return None if is_identity else ids
