"""Drafts with a subset of the target's layers; with a trained exit, on the target's own KV rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.backends.batch import MAX_DRAFT_NODES, Tap
from foreword.backends.interface import HeadInput, head_output
from foreword.drafters.heads.growing import grow_by_passes
from foreword.drafters.heads.in_pages import HeadInPages
from foreword.drafters.heads.loading import HEAD_BY_LEVEL, DraftVocabulary, LoadedRows, draft_where_ready
from foreword.drafters.model.autoregressive import AutoregressiveDrafter, DraftingSize
from foreword.drafters.registry import DrafterResources, drawn_kind, tree_width
from foreword.drafters.trees import HeadTree
from foreword.errors import RequestError
from foreword.kv.spec import RowSpec
from foreword.models.formats.checkpoint import Checkpoint, DerivedCheckpoint, QuantizedTensor
from foreword.models.formats.fields import ConfigFields
from foreword.models.formats.hf.checkpoint import HfCheckpoint, read_json_object
from foreword.models.sources.resolve import resolve_model
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftTask, RequestRows
from foreword.speculation.layout import SequenceRows
from foreword.speculation.settings import DrafterSettings, at_least, setting

# Matrices that an adapter uses from the target.
_SHARED = frozenset({"model.embed_tokens.weight", "lm_head.weight"})


class AdapterCheckpoint(DerivedCheckpoint):
    """The files of an exit adapter; embedding and output matrix are the target's."""

    def __init__(self, layer: HfCheckpoint, target: Checkpoint, exit_layer: int) -> None:
        """`layer` are the adapter's own files, `exit_layer` is the number of target layers before it."""
        super().__init__(target)
        self.path, self.config = layer.path, layer.config
        self.exit_layer = exit_layer
        self._layer = layer

    def tensor_names(self) -> frozenset[str]:
        return self._layer.tensor_names() | (super().tensor_names() & _SHARED)

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._holder(name).load(name, dtype)

    def pieces(self, name: str, dtype: torch.dtype, rows: int) -> Iterator[Tensor]:
        return self._holder(name).pieces(name, dtype, rows)

    def quantized(self, name: str) -> QuantizedTensor | None:
        return self._holder(name).quantized(name)

    def _holder(self, name: str) -> Checkpoint:
        return self._layer if name in self._layer.tensor_names() else self.original

    def sampling_defaults(self) -> dict[str, float]:
        return {}


def open_adapter(model: str, target: Checkpoint) -> AdapterCheckpoint:
    """Open the exit adapter in a directory; raise `RequestError` if it was trained for a target of another shape."""
    path = resolve_model(model)
    values = read_json_object(path / "config.json", "an exit adapter (`foreword train exit`)")
    exit_layer = ConfigFields(values, str(path / "config.json")).count("exit_layer")
    layer, config = HfCheckpoint(path), target.config
    equal = ("architecture", "vocab_size", "hidden_size", "norm", "tied_embeddings", "layer")
    fits = all(getattr(layer.config, name) == getattr(config, name) for name in equal)
    if not fits or not 1 <= exit_layer < config.num_layers:
        raise RequestError(
            f"{path} is an exit adapter of another model; train one for this model with `foreword train exit`"
        )
    return AdapterCheckpoint(layer, target, exit_layer)


STATE_OFFSET = 0
"""A token's row is computed from its own state. The newest token has none yet, so a pass computes it first."""


class ExitHead(HeadInPages):
    """An exit layer with KV rows of its own. The target's layers before it use the target's KV rows.

    In these layers, a draft token's row is written to the slot where the target's pass will write the same row.
    """

    traits = HEAD_BY_LEVEL

    def __init__(self, loaded: LoadedRows, width: int) -> None:
        super().__init__(loaded, STATE_OFFSET, scratch=MAX_DRAFT_NODES if width > 1 else 0)
        self._width = width

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """Return a chain, or a tree of `tree_width`; empty if the target has not computed all earlier tokens."""
        return draft_where_ready(tasks, list(map(self._ready_pages, tasks)), self._draft)

    def _ready_pages(self, task: DraftTask) -> RequestRows | None:
        """Return the request's pages; None if the target has not computed all earlier tokens, or pages are short."""
        pages, end = self._known_pages(task), len(task.request.tokens) - 1
        has_rows = pages is not None and pages.kv.computed >= end > 0 and pages.kv.reserved > end
        return pages if has_rows else None

    def _draft(self, tasks: list[DraftTask], pages: list[RequestRows]) -> list[Draft]:
        ranges, starts = self._missing(tasks, pages)
        store = pages[0].store
        if ranges:
            self._fill_rows(ranges)
        newest_tokens, trees = [], []
        for task, (kv, *_) in zip(tasks, pages, strict=True):
            tokens = task.request.tokens
            newest_tokens.append(SequenceRows(kv, tokens, 1, Draft(), first=len(tokens) - 1))
            trees.append(HeadTree(task, self._width, kv.reserved - len(tokens)))
        arrays = self._buffers.lay_out(pages[0].cache, newest_tokens, ()).arrays
        no_states = torch.empty(len(tasks), 0)  # the target's first layers compute the states
        head_input = HeadInput(arrays, starts, no_states, are_head_states=True)
        runner, tables = self._rows_runner, arrays.block_tables
        output = head_output(runner, head_input, store)
        grow_by_passes(trees, output, tables, starts, runner, store, self._vocabulary)
        return [tree.draft() for tree in trees]


@dataclass(frozen=True)
class LayerSkipConfig(DrafterSettings):
    """The layers that draft. Any choice is exact, because the target's pass rewrites every row."""

    layers: tuple[int, ...] | None = setting(None, "layers to run, ascending; default: the first ones")
    exit_layer: int = setting(0, "run this many of the first layers; 0: half of them", at_least(0))
    adapter: str | None = setting(
        None,
        "directory written by `foreword train exit`; it fixes the exit layer, so leave out `layers` and `exit_layer`",
    )
    tree_width: int = tree_width()
    own_kv: bool = setting(False, "the adapter keeps its own KV rows and does not use the target's")

    def __post_init__(self) -> None:
        super().__post_init__()
        listed = self.layers if isinstance(self.layers, list | tuple) else ()
        is_list = bool(listed) and all(type(layer) is int for layer in listed)
        if self.layers is not None and not is_list:
            raise RequestError(
                "speculation: layers must be a list of the layers that run, such as [0, 1, 2, 3], "
                f"not {self.layers!r}"[:300]
            )
        if self.layers is not None and self.exit_layer:
            raise RequestError("speculation: layers and exit_layer exclude each other; give one")
        if self.adapter is None:
            if self.own_kv:
                raise RequestError("speculation: own_kv is for an adapter; leave it out or name one")
            return
        if not isinstance(self.adapter, str):
            raise RequestError(f"speculation: adapter must be a directory, not {self.adapter!r}")
        if self.layers is not None or self.exit_layer:
            raise RequestError("speculation: an adapter knows its layer; leave out layers and exit_layer")

    def layers_to_run(self, num_layers: int) -> tuple[int, ...]:
        """Return the indices of the layers that draft, in a model with this many layers."""
        if self.layers is not None:
            return tuple(self.layers)
        return tuple(range(self.exit_layer or max(1, num_layers // 2)))


def build_layer_skip(config: LayerSkipConfig, resources: DrafterResources) -> Drafter:
    """Create a drafter that shares the target's weights and, with an adapter on a supporting backend, its KV rows."""
    num_layers = resources.target.config.num_layers
    adapter = None if config.adapter is None else open_adapter(config.adapter, resources.checkpoint)
    if adapter is not None and (exit_head := _exit_head(config, adapter, resources)) is not None:
        return exit_head
    if config.exit_layer > num_layers:
        raise RequestError(
            f"speculation: exit_layer is {config.exit_layer}, and the model has {num_layers} layers"
        )
    layers = config.layers_to_run(num_layers) if adapter is None else tuple(range(adapter.exit_layer))
    if not layers or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < num_layers:
        raise RequestError(
            f"speculation: layers must be ascending and within 0 .. {num_layers - 1}, not {list(layers)}"
        )
    target_layers = resources.target.with_layers(layers)
    decoder = target_layers if adapter is None else target_layers.followed_by(adapter)
    added_bytes = decoder.layer_bytes - target_layers.layer_bytes
    return AutoregressiveDrafter(decoder, resources.vocab_size, DraftingSize(config.tree_width), added_bytes)


def _exit_head(
    config: LayerSkipConfig, adapter: AdapterCheckpoint, resources: DrafterResources
) -> ExitHead | None:
    """Return the exit drafter; None if it must keep its own KV rows of all layers."""
    if adapter.config.num_layers != 1 or config.own_kv:
        return None
    name, layer = f"exit:{adapter.path.resolve()}", adapter.exit_layer
    runner = resources.target.heads.exit(adapter, layer, name)
    if runner is None:
        return None
    rows = RowSpec(name, 1, *adapter.config.layer.attention.kv_row_sizes)
    vocabulary = DraftVocabulary(None, resources.vocab_size, resources.target.device)
    return ExitHead(LoadedRows(runner, rows, (Tap(layer),), vocabulary), config.tree_width)


KIND = drawn_kind(
    AutoregressiveDrafter, "the target without some of its layers", LayerSkipConfig, build_layer_skip
)
