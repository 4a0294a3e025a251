"""A real decoder, small enough that all its short texts can be listed."""

import torch
from torch import Tensor

from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.weights import DecoderWeights, LayerWeights
from foreword.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, NormSpec, RopeSpec

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
