"""Small decoders with parts that not every backend has, for random checkpoints."""

from dataclasses import replace

from foreword.models.config import (
    AttentionSpec,
    ExpertsSpec,
    GroupScore,
    LayerSpec,
    MlpSpec,
    ModelConfig,
    Norms,
    NormSpec,
    RopeSpec,
    Scores,
    YarnRopeScaling,
)

_ATTENTION = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16)
_MLP = MlpSpec(100)
_BASE = ModelConfig(
    architecture="tiny",
    vocab_size=360,
    hidden_size=72,
    context_length=512,
    layers=(LayerSpec(_ATTENTION, _MLP),) * 2,
    norm=NormSpec(1e-5),
    rope=RopeSpec(1e4),
    tied_embeddings=True,
)
_SOFTMAX = ExpertsSpec(count=6, per_token=2, size=40, normalize=True)
_GROUPED = ExpertsSpec(
    count=8,
    per_token=3,
    size=24,
    scores=Scores.SIGMOID,
    normalize=True,
    scale=1.5,
    corrected=True,
    groups=4,
    top_groups=2,
    group_score=GroupScore.TOP2,
    shared_gate=True,
)

_CLAMPED = replace(_SOFTMAX, normalize=True, bias=True, clamp=0.5)

CONFIGS = {
    "windows": replace(
        _BASE,
        layers=(
            LayerSpec(replace(_ATTENTION, window=21), _MLP),
            LayerSpec(replace(_ATTENTION, is_rotated=False, qk_norm=True), MlpSpec(56)),
            LayerSpec(replace(_ATTENTION, window=3), _MLP),
        ),
        rope=RopeSpec(1e4, YarnRopeScaling(4.0, 64), magnitude=1.2, rotary_dim=12),
    ),
    "one window": replace(
        _BASE, layers=(LayerSpec(replace(_ATTENTION, window=21), _MLP),), tied_embeddings=False
    ),
    "experts": replace(
        _BASE,
        layers=(LayerSpec(replace(_ATTENTION, window=40), MlpSpec(0, experts=_SOFTMAX)),) * 2,
    ),
    "groups": replace(
        _BASE, layers=(LayerSpec(_ATTENTION, _MLP), LayerSpec(_ATTENTION, MlpSpec(32, experts=_GROUPED)))
    ),
    "sinks": replace(
        _BASE,
        layers=(
            LayerSpec(replace(_ATTENTION, window=21, sinks=True), MlpSpec(0, experts=_CLAMPED)),
            LayerSpec(replace(_ATTENTION, sinks=True), MlpSpec(0, experts=_CLAMPED)),
        ),
    ),
    "norms after": replace(
        _BASE,
        layers=(
            LayerSpec(replace(_ATTENTION, qk_norm=True, wide_qk_norm=True), _MLP, Norms.AFTER),
            LayerSpec(_ATTENTION, _MLP, Norms.AROUND),
        ),
    ),
    "caps": replace(
        _BASE,
        layers=(
            LayerSpec(
                replace(_ATTENTION, window=21, softcap=2.0, rope=RopeSpec(1e3)),
                MlpSpec(100, activation="gelu_pytorch_tanh"),
                Norms.AROUND,
            ),
            LayerSpec(
                replace(_ATTENTION, softcap=1.5, scale=0.4), MlpSpec(56, activation="gelu_pytorch_tanh")
            ),
            LayerSpec(replace(_ATTENTION, rope=RopeSpec(1e2, magnitude=0.9)), _MLP),
        ),
        logit_softcap=2.5,
        embedding_scale=8.0,
    ),
    "scales": replace(
        _BASE,
        layers=(LayerSpec(replace(_ATTENTION, scale=0.11), _MLP, residual_scale=0.4),) * 2,
        embedding_scale=3.0,
        logit_scale=0.2,
    ),
}
