"""EAGLE-1 and EAGLE-2 heads: the same weights under two names."""

from foreword.models.formats.hf.rope import rope_spec
from foreword.models.heads.checks import checked_shapes, vocabulary_shapes
from foreword.models.heads.files import HeadFiles
from foreword.models.heads.layouts.blocks import layer_shapes, read_layers, read_norm
from foreword.models.heads.layouts.eagle3 import section
from foreword.models.heads.spec import HeadSpec, Join


def read_eagle(files: HeadFiles) -> HeadSpec:
    """The head that these files describe. Whether its fc has a bias is up to the file, whatever the config says."""
    fields = files.fields
    inner = section(fields, "model") or fields  # vLLM's conversions keep the layer's config inside
    hidden, vocab = inner.count("hidden_size"), inner.count("vocab_size")
    layers = read_layers(inner, files.shapes)
    required, optional = vocabulary_shapes(vocab, vocab, hidden)
    required = {**required, "fc.weight": (hidden, 2 * hidden)}
    for index, layer in enumerate(layers):
        required |= layer_shapes(index, layer, hidden, hidden)
        if index:
            required[f"layers.{index}.input_layernorm.weight"] = (hidden,)
    return HeadSpec(
        kind="eagle",
        hidden_size=hidden,
        layers=layers,
        norm=read_norm(inner),
        rope=rope_spec(inner),
        vocab_size=vocab,
        draft_vocab_size=vocab,
        target_hidden_size=hidden,
        num_taps=1,
        boundaries=None,
        reads_normed=True,
        join=Join.FUSED,
        shapes=checked_shapes(files, required, {**optional, "fc.bias": (hidden,)}),
    )
