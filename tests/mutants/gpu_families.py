"""Defects of what layers of different families have, on a GPU: windows, caps, norms, experts and latent rows."""

from catalogue import UNIT, Mutant

KERNELS = f"{UNIT}/backends/cuda/test_kernels.py"
ATTENTION = f"{UNIT}/backends/cuda/test_attention.py::test_windows_scales_and_caps"
EXPERTS = f"{UNIT}/backends/cuda/test_experts.py"
LATENT = f"{UNIT}/backends/cuda/test_latent.py"

GPU_FAMILY_MUTANTS = (
    Mutant(
        98,
        "a window is one position too wide",
        "backends/cuda/kernels/attention_parts.py",
        "_step",
        "position[None, :] >= (lengths - window)[:, None]",
        "position[None, :] >= (lengths - window - 1)[:, None]",
        (ATTENTION,),
    ),
    Mutant(
        98,
        "a row's first part within its window is not merged",
        "backends/cuda/kernels/attention.py",
        "_merge_parts",
        "tl.maximum(length - window, 0) // PART",
        "tl.maximum(length - window, 0) // PART + 1",
        (ATTENTION,),
    ),
    Mutant(
        98,
        "scores are scaled to their cap and not squashed",
        "backends/cuda/kernels/attention_parts.py",
        "_follow",
        "tanh(scores) * cap",
        "scores * cap",
        (ATTENTION,),
    ),
    Mutant(
        98,
        "numbers of a head after the rotated ones are not stored where they were",
        "backends/cuda/kernels/rotation.py",
        "_rotate_and_keep",
        "tl.where(pair < turned, turned, half - turned)",
        "tl.where(pair < turned, turned, turned)",
        (f"{KERNELS}::test_rotation_with_the_write_to_kv_memory",),
    ),
    Mutant(
        98,
        "padding takes experts",
        "backends/cuda/kernels/routing.py",
        "_route",
        "tl.load(slots + row) == spare_slot",
        "tl.load(slots + row) < 0",
        (f"{EXPERTS}::test_experts_are_those_of_the_reference_and_of_equals_the_lower",),
    ),
    Mutant(
        98,
        "an expert's blocks begin where those of the expert before may still be",
        "backends/cuda/kernels/routing.py",
        "_sort",
        "tl.minimum(before, before // ROWS + expert)",
        "tl.minimum(before, before // ROWS + expert // 2)",
        (f"{EXPERTS}::test_every_pair_is_in_one_block_of_its_expert",),
    ),
    Mutant(
        98,
        "experts count alike, whatever the router says",
        "backends/cuda/kernels/experts.py",
        "_down_rows",
        "total * share[:, None]",
        "total",
        (f"{EXPERTS}::test_a_mixture_says_what_the_reference_says",),
    ),
    Mutant(
        98,
        "what an expert says is stored by the order of its block",
        "backends/cuda/kernels/experts.py",
        "_down_rows",
        "(pair % TAKEN).to(tl.int64) * num_rows + pair // TAKEN",
        "(pair % TAKEN).to(tl.int64) * num_rows + m // TAKEN",
        (f"{EXPERTS}::test_a_mixture_says_what_the_reference_says",),
    ),
    Mutant(
        98,
        "groups of experts in 4 bits have their neighbours' exponents",
        "backends/cuda/kernels/mxfp4.py",
        "_unpacked",
        "tl.arange(0, groups)",
        "tl.arange(0, groups) ^ 1",
        (f"{EXPERTS}::test_experts_in_4_bits_say_the_same_as_unpacked_ones",),
    ),
    Mutant(
        98,
        "scores of latent rows leave out the rotated numbers",
        "backends/cuda/kernels/attention_parts.py",
        "_follow",
        "if EXTRA > 0:\n    scores = tl.dot(more_q, more_keys, scores, input_precision=PRECISION)",
        "",
        (f"{LATENT}::test_rows_see_latent_rows_of_their_path",),
    ),
)
