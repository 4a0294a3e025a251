from collections.abc import Sequence
from typing import Any

from numpy import float32, float64, int8, int32, int64, uint8, uint64
from numpy.typing import NDArray
from torch import Tensor

PAGE_SIZE: int
MIN_TILED_TOKENS: int
MIN_TILED_BLOCK_TOKENS: int
STATE_CHUNK: int
RING_ROWS: int
SHARE_PART: int
BATCH_ARRAYS: list[str]
BLOCK_KINDS: list[str]

Floats = NDArray[float32] | Tensor
Ints = NDArray[int32] | Tensor
Longs = NDArray[int64] | Tensor
Bytes = NDArray[int8] | Tensor
Blocks = NDArray[uint8]

def instruction_sets() -> list[str]: ...
def quantize(
    x: Floats, group_size: int, is_rotated: bool, q: Bytes, scale: Floats, sums: Floats, isa: str
) -> None: ...
def rms_norm(x: Floats, weight: Floats, eps: float, out: Floats, isa: str) -> None: ...
def silu_mul(gate: Floats, up: Floats, isa: str) -> None: ...
def dequantize(kind: str, blocks: Blocks, out: Floats) -> None: ...

class Arena:
    def __init__(self) -> None: ...

class PackedMatrix:
    @staticmethod
    def keep_floats(arena: Arena, values: Floats) -> PackedMatrix: ...
    @staticmethod
    def round_factor(arena: Arena, values: Floats) -> PackedMatrix: ...
    @staticmethod
    def keep_blocks(arena: Arena, kind: str, blocks: Blocks, threads: int) -> PackedMatrix: ...
    @staticmethod
    def zeros_int8(arena: Arena, rows: int, cols: int, group_size: int, is_rotated: bool) -> PackedMatrix: ...
    def round_rows(self, first: int, values: Floats, isa: str, threads: int) -> None: ...
    @staticmethod
    def round_floats(
        arena: Arena, values: Floats, group_size: int, is_rotated: bool, isa: str, threads: int
    ) -> PackedMatrix: ...
    @staticmethod
    def round_blocks(
        arena: Arena, kind: str, blocks: Blocks, group_size: int, is_rotated: bool, isa: str, threads: int
    ) -> PackedMatrix: ...
    def set_bias(self, bias: Floats) -> None: ...
    def multiply(self, x: Floats, out: Floats, isa: str) -> None: ...
    def expand_row(self, row: int, out: Floats, isa: str) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def format(self) -> str: ...
    @property
    def nbytes(self) -> int: ...

class KvStore:
    def __init__(self, pages: int, kinds: list[tuple[int, int, int, bool]], dtype: str) -> None: ...
    def arrays(self, kind: int) -> tuple[NDArray[Any], NDArray[Any]]: ...
    def copy_rows(self, copies: Ints) -> None: ...
    @property
    def pages(self) -> int: ...
    @property
    def bytes_per_row(self) -> int: ...

class Experts:
    def __init__(
        self,
        router: PackedMatrix,
        gate: list[PackedMatrix],
        up: list[PackedMatrix],
        down: list[PackedMatrix],
        per_token: int,
        uses_sigmoid: bool,
        normalizes: bool,
        scale: float,
        groups: int,
        top_groups: int,
        group_top_experts: int,
        correction: Floats | None,
        shared_gate: Floats | None,
    ) -> None: ...
    def set_clamp(self, limit: float, slope: float) -> None: ...
    @property
    def nbytes(self) -> int: ...

class Latent:
    def __init__(
        self,
        kv_rank: int,
        rope_dim: int,
        nope_dim: int,
        value_dim: int,
        eps: float,
        query: PackedMatrix | None,
        keys: list[PackedMatrix],
        values: list[PackedMatrix],
    ) -> None: ...
    @property
    def nbytes(self) -> int: ...

class Recurrent:
    def __init__(
        self,
        kind: str,
        kernel_size: int,
        heads: int,
        value_dim: int,
        key_heads: int,
        key_dim: int,
        conv: Floats,
        conv_bias: Floats | None,
        norm: Floats | None,
        log_decay_rates: Floats | None,
        time_bias: Floats | None,
        skip: Floats | None,
        norm_groups: int,
        time_step_limits: tuple[float, float],
    ) -> None: ...

class StateStore:
    def __init__(self, recurrent: Recurrent, layers: int, states: int, rings: int) -> None: ...
    def matrices(self) -> NDArray[float32]: ...

class Decoder:
    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rms_norm_eps: float,
        magnitude: float,
        inverse_frequencies: Floats,
        isa: str,
        threads: int,
        embedding_scale: float,
        logit_scale: float,
        logit_softcap: float,
    ) -> None: ...
    def add_rope(self, inverse_frequencies: Floats, magnitude: float) -> int: ...
    def add_layer(
        self,
        attention_norm: Floats | None,
        mlp_norm: Floats | None,
        mixing: list[PackedMatrix],
        mlp: list[PackedMatrix],
        query_norm: Floats | None,
        key_norm: Floats | None,
        experts: Experts | None,
        window: int,
        has_rope: bool,
        score_scale: float,
        post_attention_norm: Floats | None,
        post_mlp_norm: Floats | None,
        residual_scale: float,
        rope_index: int,
        softcap: float,
        activation: str,
        recurrent: Recurrent | None,
        latent: Latent | None,
    ) -> None: ...
    def set_sinks(self, sinks: Floats) -> None: ...
    def set_embedding_and_output(
        self, embedding: PackedMatrix, head: PackedMatrix, final_norm: Floats
    ) -> None: ...
    def forward(
        self,
        store: KvStore,
        arrays: tuple[NDArray[Any], ...],
        taps: Sequence[tuple[int, bool]],
        logits: Floats,
        hidden: Floats,
        adapters: Sequence[int],
        states: StateStore | None,
        chunks: Sequence[tuple[Any, ...]],
        ring_copies: Sequence[tuple[int, int]],
        shares: Floats | None,
    ) -> None: ...
    def exit(
        self,
        store: KvStore,
        kind: int,
        arrays: tuple[NDArray[Any], ...],
        starts: Ints,
        states: Floats | None,
        logits: Floats,
    ) -> None: ...
    def set_adapter(
        self, slot: int, layers: list[list[tuple[PackedMatrix, PackedMatrix] | None]] | None
    ) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def weight_bytes(self) -> int: ...

class BlockConvolution:
    def __init__(self, taps: int, group: int, base: Floats, projection: PackedMatrix) -> None: ...

class Head:
    def __init__(
        self,
        decoder: Decoder,
        draft_vocab_size: int,
        feature_width: int,
        join: str,
        norm_before_residual: bool,
        norm_output: bool,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rms_norm_eps: float,
        magnitude: float,
        inverse_frequencies: Floats,
    ) -> None: ...
    def set_inputs(
        self,
        fc: PackedMatrix | None,
        feature_norms: Sequence[Floats],
        embedding_norm: Floats | None,
        hidden_norm: Floats | None,
    ) -> None: ...
    def add_layer(
        self,
        attention_norm: Floats | None,
        mlp_norm: Floats,
        mixing: list[PackedMatrix],
        mlp: list[PackedMatrix],
        query_norm: Floats | None,
        key_norm: Floats | None,
        experts: Experts | None,
        score_scale: float,
        latent: Latent | None,
    ) -> None: ...
    def set_embedding_and_output(
        self, embedding: PackedMatrix, output: PackedMatrix, final_norm: Floats | None
    ) -> None: ...
    def set_markov(self, embedding: PackedMatrix, output: PackedMatrix) -> None: ...
    def set_selector(
        self,
        predecessor: PackedMatrix,
        successor: PackedMatrix,
        projection: PackedMatrix,
        candidates: int,
        logit_scale: float,
        logit_cap: float,
        embedding_scale: float,
    ) -> None: ...
    def set_convolutions(self, attention: BlockConvolution, mlp: BlockConvolution) -> None: ...
    def forward(
        self,
        store: KvStore,
        kind: int,
        arrays: tuple[NDArray[Any], ...],
        starts: NDArray[int32],
        features: Floats,
        are_own_states: bool,
        logits: Floats,
        states: Floats,
    ) -> None: ...
    def draft_chains(
        self,
        store: KvStore,
        kind: int,
        arrays: tuple[NDArray[Any], ...],
        starts: NDArray[int32],
        features: Floats,
        lengths: NDArray[int32],
        depths: NDArray[int32],
        ids: NDArray[int32] | None,
        vocab: int,
        temperature: NDArray[float64],
        top_k: NDArray[int64],
        top_p: NDArray[float64],
        min_p: NDArray[float64],
        stems: NDArray[uint64],
        tokens: NDArray[int32],
        stop: tuple[Floats, Floats, Floats, Floats] | None,
    ) -> None: ...
    def draft_blocks(
        self,
        store: KvStore,
        kind: int,
        context: tuple[tuple[NDArray[Any], ...], NDArray[int32], Floats] | None,
        arrays: tuple[NDArray[Any], ...],
        starts: NDArray[int32],
        features: Floats,
        lengths: NDArray[int32],
        depths: NDArray[int32],
        ids: NDArray[int32] | None,
        vocab: int,
        temperature: NDArray[float64],
        top_k: NDArray[int64],
        top_p: NDArray[float64],
        min_p: NDArray[float64],
        stems: NDArray[uint64],
        tokens: NDArray[int32],
        stop: tuple[Floats, Floats, Floats, Floats] | None,
    ) -> None: ...

class Sampler:
    def __init__(self, threads: int) -> None: ...
    def floors(
        self,
        logits: NDArray[float32],
        temperature: NDArray[float64],
        top_k: NDArray[int64],
        top_p: NDArray[float64],
        min_p: NDArray[float64],
        peak: NDArray[float32],
        floor: NDArray[float32],
        greedy_token: NDArray[int64],
    ) -> None: ...
    def draw(
        self,
        logits: NDArray[float32],
        peak: NDArray[float32],
        floor: NDArray[float32],
        temperature: NDArray[float64],
        greedy_token: NDArray[int64],
        keys: NDArray[int64],
        tokens: NDArray[int64],
    ) -> None: ...
    def sample(
        self,
        logits: NDArray[float32],
        temperature: NDArray[float64],
        top_k: NDArray[int64],
        top_p: NDArray[float64],
        min_p: NDArray[float64],
        stems: NDArray[uint64],
        positions: NDArray[int64],
        tokens: NDArray[int64],
        status: NDArray[int64],
        drafted: tuple[list[int], list[int]] | None,
    ) -> None: ...
