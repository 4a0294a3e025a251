"""Requests without an engine, for single passes, and a decoder small enough to list all its short texts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.acceptance.rules.rule import Rule
from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.weights import DecoderWeights, LayerWeights
from foreword.engine.requests.answer import RequestLimits
from foreword.engine.requests.request import Request
from foreword.kv.paged_cache import PagedCache
from foreword.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, NormSpec, RopeSpec


def lone_request(
    cache: PagedCache,
    prompt: Sequence[int],
    vocab_size: int,
    params: SamplingParams | None = None,
    *,
    seed: int = 0,
    rule: Rule = Rule.COUPLED,
) -> Request:
    """A prompt with KV pages of its own and nothing computed; its context never ends."""
    chosen = params or SamplingParams(temperature=0)
    sampler = RequestSampler(chosen, TokenLimits(vocab_size), prompt, seed, rule=rule)
    request = Request(seed, prompt, chosen, sampler, RequestLimits(1 << 30, frozenset()))
    request.kv = cache.open()
    return request


HIDDEN, HEAD_DIM = 8, 4


def tiny_decoder(vocab_size: int, seed: int) -> TorchDecoder:
    """One layer of random weights; its logits are a few units apart."""
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
        qkv_bias=None,
        query_norm=None,
        key_norm=None,
        output=weight(HIDDEN, attention.query_width),
        output_bias=None,
        mlp_norm=torch.ones(HIDDEN),
        gate_up=weight(2 * HIDDEN, HIDDEN),
        gate_up_bias=None,
        down=weight(HIDDEN, HIDDEN),
        down_bias=None,
    )
    embedding, head = weight(vocab_size, HIDDEN, scale=1.0), weight(vocab_size, HIDDEN)
    return TorchDecoder(config, DecoderWeights(embedding, (layer,), torch.ones(HIDDEN), head))
