"""Requests without an engine, for single passes, and a decoder small enough to list all its short texts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.acceptance.rules.rule import Rule
from foreword.backends.batch import ForwardBatch
from foreword.backends.interface import Decoder
from foreword.backends.runner import ModelRunner
from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.weights import DecoderWeights, LayerWeights
from foreword.engine.requests.answer import RequestLimits
from foreword.engine.requests.request import Request
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, NormSpec, RopeSpec
from foreword.speculation.draft import Draft
from foreword.speculation.requests import PassEntry
from foreword.speculation.transaction import Transaction
from foreword.speculation.verdict import NOTHING_DRAWN


def lone_request(
    cache: PagedCache,
    prompt: Sequence[int],
    vocab_size: int,
    params: SamplingParams | None = None,
    *,
    seed: int = 0,
    rule: Rule = Rule.COUPLED,
) -> Request:
    """Return a prompt with KV pages of its own and nothing computed; its context never ends."""
    chosen = params or SamplingParams(temperature=0)
    sampler = RequestSampler(chosen, TokenLimits(vocab_size), prompt, seed, rule=rule)
    request = Request(seed, prompt, chosen, sampler, RequestLimits(1 << 30, frozenset()))
    request.kv = cache.open()
    return request


class CachedRequests:
    """Requests whose texts are in the KV store, for passes that are repeated and never committed."""

    def __init__(self, decoder: Decoder, texts: Sequence[Sequence[int]], room: int) -> None:
        """`room` is the number of new tokens that every request may have in a pass."""
        pages = sum(-(-(len(text) + room) // PAGE_SIZE) + 1 for text in texts)
        self.cache, self._vocab_size = PagedCache(pages), decoder.config.vocab_size
        self.runner = ModelRunner.allocate(decoder, pages, PAGE_SIZE)
        self.requests = [self.open(text, seed) for seed, text in enumerate(texts)]
        for request in self.requests:
            if len(request.tokens) > 1:
                with Transaction(self.cache, [PassEntry.of(request, len(request.tokens) - 1)]) as transaction:
                    self.runner.forward(transaction.batch([Draft()]))
                    transaction.commit([NOTHING_DRAWN])

    def open(self, text: Sequence[int], seed: int = 0) -> Request:
        """Return a request with KV pages of its own and nothing computed."""
        return lone_request(self.cache, text, self._vocab_size, seed=seed)

    @contextmanager
    def batch(self, drafts: Sequence[Draft], requests: Sequence[Request] = ()) -> Iterator[ForwardBatch]:
        """Yield the pass over what is not computed of the first requests, or of these, and their drafts."""
        chosen = requests or self.requests[: len(drafts)]
        entries = [PassEntry.of(request, len(request.tokens) - request.kv.computed) for request in chosen]
        with Transaction(self.cache, entries) as transaction:  # left without commit: every pass starts alike
            yield transaction.batch(drafts)


@contextmanager
def prompt_pass(decoder: Decoder, tokens: Sequence[int]) -> Iterator[tuple[ModelRunner, ForwardBatch]]:
    """Yield the pass over a whole prompt, on fresh memory."""
    cache = PagedCache(-(-len(tokens) // PAGE_SIZE))
    runner = ModelRunner.allocate(decoder, cache.pool.num_pages, PAGE_SIZE)
    request = lone_request(cache, tokens, decoder.config.vocab_size)
    with Transaction(cache, [PassEntry.of(request, len(tokens))]) as transaction:
        yield runner, transaction.batch([Draft()])


HIDDEN, HEAD_DIM = 8, 4


def tiny_decoder(vocab_size: int, seed: int) -> TorchDecoder:
    """Return a decoder with one layer of random weights, whose logits are a few units apart."""
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int, scale: float = 0.5) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    attention = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=HEAD_DIM)
    config = ModelConfig(
        architecture="llama",
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        context_length=64,
        layers=(LayerSpec(attention, MlpSpec(HIDDEN)),),
        norm=NormSpec(1e-5),
        rope=RopeSpec(100.0),
        tied_embeddings=False,
    )
    layer = LayerWeights(
        input_norm=torch.ones(HIDDEN),
        qkv=weight(attention.query_width + 2 * attention.kv_width, HIDDEN),
        output=weight(HIDDEN, attention.query_width),
        mlp_norm=torch.ones(HIDDEN),
        gate_up=weight(2 * HIDDEN, HIDDEN),
        down=weight(HIDDEN, HIDDEN),
    )
    embedding, head = weight(vocab_size, HIDDEN, scale=1.0), weight(vocab_size, HIDDEN)
    return TorchDecoder(config, DecoderWeights(embedding, (layer,), torch.ones(HIDDEN), head))
