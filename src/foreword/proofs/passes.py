"""Single passes without an engine, and a decoder that is small enough to enumerate its texts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil

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
from foreword.kv.chunks import NO_STATES, StateSizes
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, NormSpec, RopeSpec
from foreword.speculation.draft import Draft
from foreword.speculation.requests import NOTHING_DRAWN, PassEntry
from foreword.speculation.transaction import Transaction


def lone_request(
    cache: PagedCache,
    prompt: Sequence[int],
    vocab_size: int,
    params: SamplingParams | None = None,
    *,
    seed: int = 0,
    rule: Rule = Rule.COUPLED,
) -> Request:
    """Return a request with its own KV pages and an unlimited context; nothing is computed yet."""
    chosen = params or SamplingParams(temperature=0)
    sampler = RequestSampler(chosen, TokenLimits(vocab_size), prompt, seed, rule=rule)
    request = Request(seed, prompt, chosen, sampler, RequestLimits(1 << 30, frozenset()))
    request.kv = cache.open()
    return request


def _states(decoder: Decoder, sequences: int) -> StateSizes:
    return NO_STATES if decoder.config.recurrent is None else StateSizes(sequences)


class CachedRequests:
    """Requests with computed KV, for repeated passes that are never committed."""

    def __init__(self, decoder: Decoder, texts: Sequence[Sequence[int]], room: int) -> None:
        """Compute the KV of these texts; `room` is the maximum number of new tokens per request and pass."""
        pages = sum(ceil((len(text) + room) / PAGE_SIZE) + 1 for text in texts)  # one more per text to spare
        states = _states(decoder, len(texts) + 1)
        self.cache, self._vocab_size = PagedCache(pages, states=states), decoder.config.vocab_size
        self.runner = ModelRunner.allocate(decoder, pages, PAGE_SIZE, states=states)
        self.requests = [self.open(text, seed) for seed, text in enumerate(texts)]
        for request in self.requests:
            if len(request.tokens) > 1:
                with Transaction(self.cache, [PassEntry.of(request, len(request.tokens) - 1)]) as transaction:
                    self.runner.forward(transaction.batch([Draft()]))
                    transaction.commit([NOTHING_DRAWN])

    def open(self, text: Sequence[int], seed: int = 0) -> Request:
        """Return a request with its own KV pages; nothing is computed yet."""
        return lone_request(self.cache, text, self._vocab_size, seed=seed)

    @contextmanager
    def batch(self, drafts: Sequence[Draft], requests: Sequence[Request] = ()) -> Iterator[ForwardBatch]:
        """Yield a pass over uncomputed tokens and drafts, of the given requests or of the first ones."""
        chosen = requests or self.requests[: len(drafts)]
        entries = [PassEntry.of(request, len(request.tokens) - request.kv.computed) for request in chosen]
        with Transaction(self.cache, entries) as transaction:  # not committed, so that passes can be repeated
            yield transaction.batch(drafts)


@contextmanager
def prompt_pass(decoder: Decoder, tokens: Sequence[int]) -> Iterator[tuple[ModelRunner, ForwardBatch]]:
    """Yield a pass over a whole prompt, with new KV memory."""
    states = _states(decoder, 1)
    cache = PagedCache(ceil(len(tokens) / PAGE_SIZE), states=states)
    runner = ModelRunner.allocate(decoder, cache.pool.num_pages, PAGE_SIZE, states=states)
    request = lone_request(cache, tokens, decoder.config.vocab_size)
    with Transaction(cache, [PassEntry.of(request, len(tokens))]) as transaction:
        yield runner, transaction.batch([Draft()])


HIDDEN, HEAD_DIM = 8, 4


def tiny_decoder(vocab_size: int, seed: int) -> TorchDecoder:
    """Return a decoder with one layer of random weights, whose logits differ by a few units."""
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
