"""Defects of model families: routing, windows, latent attention, rope."""

from catalogue import UNIT, Mutant

ROUTING = f"{UNIT}/backends/test_experts.py"
CONFIGS = f"{UNIT}/models/test_family_configs.py"
PACKED = f"{UNIT}/models/test_packed_weights.py"
MIXED = "tests/integration/test_cpu_mixed.py"
WINDOWS = f"{UNIT}/backends/test_windows.py"
LATENT = f"{UNIT}/backends/test_latent_rows.py"

FAMILY_MUTANTS = (
    Mutant(
        90,
        "the correction that chooses experts counts in their weights, too",
        "backends/torch/experts.py",
        "    share = scores.gather(1, chosen)\n",
        "    share = choice.gather(1, chosen)\n",
        (f"{ROUTING}::test_the_correction_chooses_but_does_not_count",),
    ),
    Mutant(
        90,
        "the weights of the taken experts are not normalised",
        "backends/torch/experts.py",
        "    if spec.normalize:\n",
        "    if False:\n",
        (f"{ROUTING}::test_weights_sum_to_one_only_where_they_should",),
    ),
    Mutant(
        90,
        "ties of experts are broken as the sort likes",
        "backends/torch/experts.py",
        "scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]",
        "scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices[:, :count].neg().add(scores.shape[1] - 1)",
        (f"{ROUTING}::test_ties_go_to_the_lower_numbers",),
    ),
    Mutant(
        91,
        "a window is one position too long",
        "backends/torch/attention.py",
        "view.visible & (seen > seen[..., -1:] - window)",
        "view.visible & (seen >= seen[..., -1:] - window)",
        (WINDOWS,),
    ),
    Mutant(
        91,
        "a window counts KV rows instead of the positions of a node's own path",
        "backends/torch/attention.py",
        "        seen = view.visible.cumsum(dim=-1)\n",
        "        seen = torch.ones_like(view.visible).cumsum(dim=-1)\n",
        (WINDOWS,),
    ),
    Mutant(
        92,
        "latent attention turns the wrong part of a query",
        "backends/torch/latent.py",
        "    plain, turned = torch.split(heads, [latent.nope_dim, latent.rope_dim], dim=-1)\n",
        "    turned, plain = torch.split(heads, [latent.rope_dim, latent.nope_dim], dim=-1)\n",
        (LATENT,),
    ),
    Mutant(
        92,
        "rotated pairs that stand side by side are taken as if they stood half apart",
        "models/formats/turned.py",
        ".reshape(-1, 2).T.reshape(-1)\n",
        ".reshape(-1, 2).reshape(-1)\n",
        (LATENT,),
    ),
    Mutant(
        93,
        "local layers turn like the others where the window is as long as the context",
        "models/formats/hf/layers.py",
        "rope=local_rope if windowed[index] else None",
        "rope=local_rope if windowed[index] and width else None",
        (f"{CONFIGS}::test_local_layers_turn_their_own_way_even_where_the_window_is_as_long_as_the_context",),
    ),
    Mutant(
        93,
        "zeros of GPTQ are taken as they are stored",
        "models/formats/hf/packed/gptq.py",
        "dim=1) + less",
        "dim=1)",
        (f"{PACKED}::test_every_matrix_holds_the_numbers_it_stands_for",),
    ),
    Mutant(
        93,
        "a file may count more experts than it holds",
        "models/formats/fields.py",
        "        if held != (experts.count if experts else 0):\n",
        "        if False:\n",
        (f"{CONFIGS}::test_values_that_contradict_each_other_are_named",),
    ),
)
