"""A pass over a part of the KV rows, the shares of attention that parts get, and the drafter that uses both."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foreword import LLM, SamplingParams
from foreword.backends.batch import SHARE_PART, ForwardBatch
from foreword.backends.interface import Decoder
from foreword.backends.torch import attention, latent, layers
from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.weights import load_weights
from foreword.engine.config import EngineConfig
from foreword.errors import RequestError
from foreword.kv.sequence import KvSequence
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.speculation.draft import NO_DRAFT, Draft
from foreword.speculation.layout import BatchBuffers, SequenceRows
from helpers.cpu import cpu_decoder, needs_cpu_kernels
from helpers.cuda import cuda_decoder, needs_triton
from helpers.passes import compute, fragmented_cache, make_request, torch_decoder
from helpers.tiny_families import make_family
from helpers.tiny_models import make_hf_model
from helpers.trees import random_tokens

PAGE = 16
BACKENDS = [
    "torch",
    "torch, padded",
    pytest.param("cpu", marks=needs_cpu_kernels),
    pytest.param("cuda", marks=needs_triton),
]
KINDS = ["plain", "qwen2", "gemma2", "gpt_oss", "deepseek_v2"]
"""Attention without anything, with windows in some layers, soft caps, sinks, and latent rows."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("kinds")
    made = {"plain": make_hf_model(folder / "plain", "qwen3")}
    for kind in KINDS[1:]:
        made[kind], _ = make_family(folder / kind, kind, max_position_embeddings=512)
    return made


def decoder_of(path: Path, backend: str) -> Decoder:
    if backend == "cpu":
        return cpu_decoder(path, "float32")
    if backend == "cuda":
        return cuda_decoder(path)
    checkpoint = open_checkpoint(path)
    weights = load_weights(checkpoint, torch.float32, torch.device("cpu"))
    return TorchDecoder(checkpoint.config, weights, bucketed=backend != "torch")


class Texts:
    """Texts in the memory of a decoder, computed up to their newest tokens."""

    def __init__(self, decoder: Decoder, texts: Sequence[list[int]]) -> None:
        self.texts = texts
        self.runner, self.cache = fragmented_cache(decoder, 24, seed=len(texts))
        self.kvs: list[KvSequence] = []
        self._buffers = BatchBuffers()
        for text in texts:
            request = make_request(self.cache, text)
            compute(self.runner, self.cache, request, len(text) - 1)
            self.cache.reserve(request.kv, 5)
            self.kvs.append(request.kv)

    def batch(self, drafts: Sequence[Draft], gaps: Sequence[range]) -> ForwardBatch:
        """The drafts after these texts, or their newest tokens; pages in the gaps are left out."""
        rows = []
        for text, kv, draft, gap in zip(self.texts, self.kvs, drafts, gaps, strict=True):
            left_out = len(gap) * PAGE
            part = KvSequence(
                [page for index, page in enumerate(kv.pages) if index not in gap], len(text) - left_out
            )
            run = 0 if draft.parents else 1
            first = len(text) - left_out - run
            rows.append(SequenceRows(part, text, run, draft, first=first, left_out=left_out))
        return self._buffers.lay_out(self.cache, rows, ())

    def logits(self, drafts: Sequence[Draft], gaps: Sequence[range]) -> Tensor:
        return self.runner.forward(self.batch(drafts, gaps)).logits.float().cpu()


TREE = Draft([40, 41, 42, 43], [-1, -1, 0, 2], 75)
NO_GAP = range(0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_left_out_pages_count_as_hidden(
    paths: dict[str, Path], kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
):
    """The newest tokens of a text with a gap and of one without, then a tree after the first, a chain after the other.

    Compared with passes over all pages in which positions of the gap are masked.
    """
    rng = random.Random(3)
    texts = [random_tokens(rng, 75), random_tokens(rng, 40)]
    drafts = [TREE, Draft.chain([50, 51], 40)]
    found = Texts(decoder_of(paths[kind], backend), texts)
    gaps = [range(1, 3), NO_GAP]
    newest, levels = found.logits([NO_DRAFT] * 2, gaps), found.logits(drafts, gaps)

    visible = attention._visible

    def masked(prefixes: Tensor, masks: Tensor, logical: Tensor) -> Tensor:
        is_in_gap = (logical >= gaps[0].start * PAGE) & (logical < gaps[0].stop * PAGE)
        return visible(prefixes, masks, logical) & ~((prefixes > 70).unsqueeze(-1) & is_in_gap)

    expected = Texts(torch_decoder(paths[kind]), texts)
    whole = expected.logits([NO_DRAFT] * 2, [NO_GAP] * 2)
    monkeypatch.setattr(attention, "_visible", masked)
    torch.testing.assert_close(newest, expected.logits([NO_DRAFT] * 2, [NO_GAP] * 2), atol=2e-4, rtol=0)
    torch.testing.assert_close(levels, expected.logits(drafts, [NO_GAP] * 2), atol=2e-4, rtol=0)
    assert (newest[0] - whole[0]).abs().max() > 1e-3, "the gap must matter"


def direct_shares(
    decoder: TorchDecoder, texts: Sequence[list[int]], monkeypatch: pytest.MonkeyPatch
) -> Tensor:
    """The shares of every text's newest token, head by head and in float64."""
    found = Texts(decoder, texts)
    shares = torch.zeros(len(texts), -(-max(map(len, texts)) // SHARE_PART), dtype=torch.float64)

    def add(queries: Tensor, keys: Tensor, number: int, scale: float, cap: float | None) -> None:
        """Queries [heads, dim] and keys [positions, kv heads, dim] of one text."""
        for head, query in enumerate(queries.double()):
            scores = keys[:, head * keys.shape[1] // len(queries)].double() @ query * scale
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            for position, weight in enumerate(scores.softmax(0)):
                shares[number, position // SHARE_PART] += weight

    def listening(queries: Tensor, keys: Any, values: Any, views: Any, *rule: Any) -> Tensor:
        scale, cap = rule[0] or queries.shape[2] ** -0.5, rule[1]
        for number, text in enumerate(texts):
            if bool(views[0].visible[0, 0, 0]):  # else a window hides the first position
                add(queries[number], keys[views[0].slots[number, : len(text)]], number, scale, cap)
        return attention.paged_attention(queries, keys, values, views, *rule)

    def listening_to_latent(
        spec: Any, weights: Any, queries: Any, rows: Tensor, view: Any, scale: float
    ) -> Tensor:
        projected = torch.einsum("rphd,hdc->rphc", queries[0], weights.keys)
        both = torch.cat((projected, queries[1]), dim=-1)
        for number, text in enumerate(texts):
            add(both[number, 0], rows[number, : len(text)].unsqueeze(1), number, scale, None)
        return absorbed(spec, weights, queries, rows, view, scale)

    absorbed = latent.absorbed
    monkeypatch.setattr(layers, "paged_attention", listening)
    monkeypatch.setattr(latent, "absorbed", listening_to_latent)
    monkeypatch.setattr(latent, "naive", listening_to_latent)
    found.logits([NO_DRAFT] * len(texts), [NO_GAP] * len(texts))
    monkeypatch.undo()
    return shares.float()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_shares_are_those_of_a_direct_sum(
    paths: dict[str, Path], kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
):
    rng = random.Random(4)
    texts = [random_tokens(rng, length) for length in (150, 20, 129)]
    expected = direct_shares(torch_decoder(paths[kind]), texts, monkeypatch)
    found = Texts(decoder_of(paths[kind], backend), texts)
    plain = found.batch([NO_DRAFT] * 3, [NO_GAP] * 3)
    before = found.runner.forward(plain)
    output = found.runner.forward(replace(plain, wants_shares=True))
    assert before.shares is None and output.shares is not None
    torch.testing.assert_close(output.shares.cpu(), expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(output.logits, before.logits, atol=1e-5, rtol=0)
    assert 0 < expected[2, 1] < expected[0, 1], "position 128 is the first of the second part"


@pytest.mark.parametrize("backend", BACKENDS)
def test_shares_of_a_pass_with_several_rows_are_refused(paths: dict[str, Path], backend: str):
    found = Texts(decoder_of(paths["plain"], backend), [random_tokens(random.Random(5), 75)])
    with pytest.raises(ValueError, match="one row per request"):
        found.runner.forward(replace(found.batch([TREE], [NO_GAP]), wants_shares=True))


FORM: dict[str, Any] = {
    "method": "sparse_kv",
    "num_speculative_tokens": 3,
    "fixed": True,
    "sink_tokens": 5,
    "window_tokens": 40,
    "top_tokens": 0,
}


def engine_for(path: Path, form: dict[str, Any] | None, backend: str = "torch") -> LLM:
    config = EngineConfig(max_step_seconds=None)  # the same passes, however fast
    return LLM(str(path), device="cpu", dtype="float32", backend=backend, speculation=form, config=config)


def heard(llm: LLM, length: int, new: int) -> tuple[list[ForwardBatch], list[int]]:
    """The passes of the drafter while a text of this length is continued, and the number of tokens at each draft."""
    drafter: Any = llm.engine.drafters.default.drafter._drafter
    passes: list[ForwardBatch] = []
    lengths: list[int] = []
    forward, propose = drafter._forward, drafter.propose

    def listening(batch: ForwardBatch) -> Any:
        passes.append(
            replace(batch, **{n: a.clone() for n, a in vars(batch).items() if isinstance(a, Tensor)})
        )
        return forward(batch)

    def listening_to_drafts(tasks: Any) -> list[Draft]:
        found: list[Draft] = propose(tasks)
        lengths.extend(
            len(task.request.tokens) for task, draft in zip(tasks, found, strict=True) if len(draft)
        )
        return found

    drafter._forward, drafter.propose = listening, listening_to_drafts
    ids = [(7 * number) % 300 + 20 for number in range(length)]
    llm.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True))
    return passes, lengths


def test_texts_that_would_be_read_as_a_whole_get_no_drafts(paths: dict[str, Path]):
    """One page of sinks, and the page in which the newest 40 positions begin: the first with a page between has 72."""
    passes, lengths = heard(engine_for(paths["plain"], FORM), 60, 30)
    assert lengths and min(lengths) == 72
    rows = [length for batch in passes for length in batch.kv_lens.tolist()]
    assert all(40 + PAGE <= count < 40 + 2 * PAGE + 4 for count in rows), "first page, window and draft"
    assert all(batch.has_gaps for batch in passes)


def test_attention_is_measured_in_a_draft_s_first_pass_and_again_after_some_tokens(paths: dict[str, Path]):
    form = FORM | {"top_tokens": 128, "refresh_tokens": 20}
    passes, lengths = heard(engine_for(paths["plain"], form), 300, 50)
    measured = [batch for batch in passes if batch.wants_shares]
    at = [int(batch.kv_lens[0]) for batch in measured]  # all rows of the text, without gaps
    assert len(at) == 3 and at[0] == 301 and all(b - a >= 20 for a, b in pairwise(at))
    assert set(at) <= set(lengths)
    others = [int(batch.kv_lens[0]) for batch in passes if not batch.wants_shares]
    assert others and max(others) < 40 + 2 * PAGE + 128 + 4


@pytest.mark.parametrize("top", [0, 128])
def test_the_parts_with_most_attention_are_read(
    paths: dict[str, Path], top: int, monkeypatch: pytest.MonkeyPatch
):
    """Shares are given, so that the second part comes first and the first, where the sinks are, never."""
    llm = engine_for(paths["plain"], FORM | {"top_tokens": top})
    drafter: Any = llm.engine.drafters.default.drafter._drafter
    forward, tables = drafter._forward, []

    def planted(batch: ForwardBatch) -> Any:
        output = forward(batch)
        tables.append((batch.wants_shares, int(batch.kv_lens[0]), batch.block_tables[0].tolist()))
        shares = torch.tensor([[9.0, 3.0, 1.0, 2.0]])[:, : -(-int(batch.kv_lens[0]) // SHARE_PART)]
        return replace(output, shares=shares if batch.wants_shares else None)

    monkeypatch.setattr(drafter, "_forward", planted)
    ids = [(7 * number) % 300 + 20 for number in range(450)]
    llm.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    if not top:
        assert not any(wants for wants, _, _ in tables)
        return
    (_, whole, pages), (_, count, some) = tables[0], tables[1]
    assert whole == 451 and tables[0][0] and not tables[1][0]
    window = (451 - 40) // PAGE
    expected = [pages[0], *pages[8:16], *pages[window : -(-452 // PAGE)]]
    assert some[: len(expected)] == expected and count == whole + 1 - (window - 1 - 8) * PAGE


@pytest.mark.parametrize(
    ("family", "reason"),
    [("mistral", "only to the newest 7 positions"), ("lfm2", "this model has recurrent ones")],
)
def test_models_without_long_kv_caches_are_refused(tmp_path: Path, family: str, reason: str):
    path, _ = make_family(tmp_path / family, family)
    with pytest.raises(RequestError, match=reason):
        engine_for(path, FORM)


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_cpu_kernels)])
@pytest.mark.parametrize("kind", ["qwen2", "gpt_oss", "deepseek_v2"])
def test_models_with_other_layers_are_drafted_for(paths: dict[str, Path], kind: str, backend: str):
    """Windows in some layers, sinks and latent rows; the text is that of plain decoding."""
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True)
    prompt = {"prompt_token_ids": [(11 * number) % 300 + 20 for number in range(300)]}
    [plain] = engine_for(paths[kind], None, backend).generate([prompt], params)
    [found] = engine_for(paths[kind], FORM | {"top_tokens": 128}, backend).generate([prompt], params)
    assert found.timings.draft_n_accepted > 0
    if backend == "cpu":
        assert found.outputs[0].token_ids == plain.outputs[0].token_ids


@needs_cpu_kernels
def test_parts_are_as_long_in_the_cpu_kernels():
    from foreword.kernels import _native

    assert _native.SHARE_PART == SHARE_PART
