"""A checkpoint of random numbers in memory: any shape, no files, no tokenizer."""

from foreword.bench.random_models import RandomCheckpoint
from foreword.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, NormSpec, RopeSpec

__all__ = ["SMOLLM2_SHAPE", "RandomCheckpoint"]

SMOLLM2_SHAPE = ModelConfig(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    context_length=8192,
    layers=(LayerSpec(AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64), MlpSpec(1536)),) * 30,
    norm=NormSpec(1e-5),
    rope=RopeSpec(100000.0),
    tied_embeddings=True,
)
