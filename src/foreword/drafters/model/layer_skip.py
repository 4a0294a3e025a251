"""The target with some of its layers left out writes ahead."""

from dataclasses import dataclass

from foreword.backends.batch import Tap
from foreword.drafters.heads.exit import ExitHead
from foreword.drafters.heads.loading import LoadedRows
from foreword.drafters.heads.vocabulary import DraftVocabulary
from foreword.drafters.model.autoregressive import AutoregressiveDrafter, DraftingSize
from foreword.drafters.model.exit_adapter import AdapterCheckpoint, open_adapter
from foreword.drafters.registry import DrafterKind, Guesses, is_wide
from foreword.drafters.resources import DrafterResources
from foreword.errors import RequestError
from foreword.kv.spec import RowSpec
from foreword.speculation.drafting import Drafter


@dataclass(frozen=True)
class LayerSkipConfig:
    """Which layers the draft keeps. The target's own pass rewrites every row, so any choice is exact."""

    layers: tuple[int, ...] | None = None  # the layers that run, ascending; None: see exit_layer
    exit_layer: int = 0  # keep the first layers up to this many; 0: half of them
    adapter: str | None = None  # what `foreword train exit` wrote; it says itself after which layer it comes
    tree_width: int = 1  # nodes on every level of the draft; 1 is a chain
    own_kv: bool = (
        False  # an adapter's layers keep KV rows of their own, also where they could share the target's
    )

    def __post_init__(self) -> None:
        if self.layers is not None and not _are_numbers(self.layers):
            raise RequestError(
                "speculation: layers must be a list of the layers that run, such as [0, 1, 2, 3], "
                f"not {self.layers!r}"[:300]
            )
        if self.layers is not None and self.exit_layer:
            raise RequestError("speculation: layers and exit_layer exclude each other; give one")
        if self.exit_layer < 0:
            raise RequestError(f"speculation: exit_layer must be 0 or more, not {self.exit_layer}")
        if self.adapter is None:
            if self.own_kv:
                raise RequestError("speculation: own_kv is for an adapter; leave it out or name one")
            return
        if not isinstance(self.adapter, str):
            raise RequestError(f"speculation: adapter must be a directory, not {self.adapter!r}")
        if self.layers is not None or self.exit_layer:
            raise RequestError("speculation: an adapter knows its layer; leave out layers and exit_layer")

    def kept(self, num_layers: int) -> tuple[int, ...]:
        """The layers that run, checked against the model."""
        if self.layers is None:
            return tuple(range(self.exit_layer or max(1, num_layers // 2)))
        return tuple(self.layers)


def _are_numbers(value: object) -> bool:
    """Whether it is a list of whole numbers, as JSON has one."""
    listed = value if isinstance(value, list | tuple) else ()
    return bool(listed) and all(isinstance(one, int) and not isinstance(one, bool) for one in listed)


def build_layer_skip(config: LayerSkipConfig, resources: DrafterResources) -> Drafter:
    """A drafter that shares the target's weights; with an adapter, where the backend can, its KV rows too."""
    num_layers = resources.target.config.num_layers
    adapter = None if config.adapter is None else open_adapter(config.adapter, resources.checkpoint)
    if adapter is not None and (exit_head := _exit_head(config, adapter, resources)) is not None:
        return exit_head
    if config.exit_layer > num_layers:
        raise RequestError(
            f"speculation: exit_layer is {config.exit_layer}, and the model has {num_layers} layers"
        )
    kept = config.kept(num_layers) if adapter is None else tuple(range(adapter.exit_layer))
    if not kept or list(kept) != sorted(set(kept)) or not 0 <= kept[0] <= kept[-1] < num_layers:
        raise RequestError(
            f"speculation: layers must be ascending and within 0 .. {num_layers - 1}, not {list(kept)}"
        )
    lower = resources.target.with_layers(kept)
    decoder = lower if adapter is None else lower.followed_by(adapter)
    own_bytes = decoder.layer_bytes - lower.layer_bytes
    return AutoregressiveDrafter(decoder, resources.vocab_size, DraftingSize(config.tree_width), own_bytes)


def _exit_head(
    config: LayerSkipConfig, adapter: AdapterCheckpoint, resources: DrafterResources
) -> ExitHead | None:
    """None: it needs KV rows of its own for all layers."""
    size = DraftingSize(config.tree_width)
    attention, layer = adapter.config.layer.attention, adapter.exit_layer
    if adapter.config.num_layers != 1 or config.own_kv:
        return None
    name = f"exit:{adapter.path.resolve()}"
    runner = resources.target.heads.exit(adapter, layer, name)
    if runner is None:
        return None
    rows = RowSpec(name, 1, *attention.kept)
    vocabulary = DraftVocabulary(None, resources.vocab_size, resources.target.device)
    return ExitHead(LoadedRows(runner, rows, (Tap(layer),), vocabulary), size.tree_width)


KIND = DrafterKind(
    "the target without some of its layers",
    LayerSkipConfig,
    build_layer_skip,
    is_wide,
    can_hang=False,
    guesses=Guesses.DRAWN,
    traits=AutoregressiveDrafter.traits,
)
