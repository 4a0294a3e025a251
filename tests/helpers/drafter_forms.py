"""Every drafter of ours in some forms, chains and trees: what the contract is checked on."""

from typing import Any

_LOOKUPS: list[dict[str, Any]] = [
    {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1},
    {"method": "suffix", "num_speculative_tokens": 12, "min_match": 1, "min_probability": 0.05},
    {"method": "prediction", "num_speculative_tokens": 6},
    {"method": ["prediction", "suffix"], "num_speculative_tokens": 9, "combine": "merge"},
    {"method": ["grammar", "ngram"], "num_speculative_tokens": 6, "prompt_lookup_min": 1},
    {"method": "rest", "num_speculative_tokens": 10, "min_match": 1},
    {"method": ["rest", "ngram"], "num_speculative_tokens": 6},
    {"method": "remote", "num_speculative_tokens": 4},
    {"method": "jacobi", "num_speculative_tokens": 6},
    {"method": "lookahead", "num_speculative_tokens": 5},
    {
        "method": "lookahead",
        "num_speculative_tokens": 40,
        "window_size": 5,
        "ngram_size": 4,
        "guess_set_size": 5,
    },
    {"method": ["lookahead", "suffix"], "num_speculative_tokens": 24, "combine": "merge"},
]
_MODELS: list[dict[str, Any]] = [
    {"method": "draft_model", "num_speculative_tokens": 4},
    {"method": "draft_model", "num_speculative_tokens": 12, "tree_width": 3},
    {"method": "layer_skip", "num_speculative_tokens": 3, "exit_layer": 1},
    {"method": "layer_skip", "num_speculative_tokens": 9, "layers": [1], "tree_width": 4, "max_depth": 3},
    {"method": "layer_skip", "num_speculative_tokens": 6, "adapter": "an exit", "tree_width": 2},
    {"method": "self_quantized", "num_speculative_tokens": 4, "bits": 4},
    {"method": "self_quantized", "num_speculative_tokens": 10, "bits": 2, "tree_width": 2},
    {"method": ["suffix", "layer_skip"], "num_speculative_tokens": 5},
    {"method": ["ngram", "draft_model"], "num_speculative_tokens": 10, "combine": "merge"},
    {
        "method": "sparse_kv",
        "num_speculative_tokens": 4,
        "sink_tokens": 3,
        "window_tokens": 8,
        "top_tokens": 0,
    },
    {
        "method": "sparse_kv",
        "num_speculative_tokens": 7,
        "sink_tokens": 0,
        "window_tokens": 1,
        "top_tokens": 0,
        "tree_width": 3,
    },
    {
        "method": ["sparse_kv", "ngram"],
        "num_speculative_tokens": 5,
        "window_tokens": 20,
        "top_tokens": 128,
        "refresh_tokens": 5,
    },
]
_STEPWISE_HEADS: list[dict[str, Any]] = [
    {"method": "eagle3", "num_speculative_tokens": 4},
    {"method": "eagle3", "num_speculative_tokens": 9, "tree_width": 3, "max_depth": 4},
    {"method": "eagle", "num_speculative_tokens": 3},
    {"method": "eagle", "num_speculative_tokens": 12, "tree_width": 4},
    {"method": "p_eagle", "num_speculative_tokens": 4},
    {"method": "p_eagle", "num_speculative_tokens": 9, "tree_width": 3, "max_depth": 4},
    {"method": "mtp", "num_speculative_tokens": 3},
    {"method": "mtp", "num_speculative_tokens": 8, "tree_width": 3},
    {"method": ["suffix", "eagle3"], "num_speculative_tokens": 5},
    {"method": "eagle3", "num_speculative_tokens": 5, "window": 10},
]
_PARALLEL_HEADS: list[dict[str, Any]] = [
    {"method": "medusa", "num_speculative_tokens": 4},
    {"method": "medusa", "num_speculative_tokens": 12, "tree_width": 3},
    {"method": "medusa", "num_speculative_tokens": 8, "medusa_choices": "file"},
    {"method": "medusa", "num_speculative_tokens": 10, "medusa_choices": "measured"},
    {"method": "dflash", "num_speculative_tokens": 5},
    {"method": "dflash", "num_speculative_tokens": 10, "tree_width": 3},
    {"method": "dspark", "num_speculative_tokens": 5},
    {"method": "dspark", "num_speculative_tokens": 9, "tree_width": 3, "confidence": 0.1},
    {"method": "dflash", "num_speculative_tokens": 4, "window": 10},
    {"method": "dflash2", "num_speculative_tokens": 4},
    {"method": "dflash2", "num_speculative_tokens": 9, "tree_width": 3},
]
FAMILIES = {
    name: [{**form, "fixed": True} for form in forms]  # asked every time, whether or not it pays
    for name, forms in (
        ("lookups", _LOOKUPS),
        ("models", _MODELS),
        ("stepwise heads", _STEPWISE_HEADS),
        ("parallel heads", _PARALLEL_HEADS),
    )
}
"""Each family is checked in batches that have all its forms."""

FORMS = [form for forms in FAMILIES.values() for form in forms]
