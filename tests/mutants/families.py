"""Defects of model families: routing, windows, latent attention, rope."""

from catalogue import UNIT, Mutant

ROUTING = f"{UNIT}/backends/test_experts.py"
CONFIGS = f"{UNIT}/models/test_family_configs.py"
PACKED = f"{UNIT}/models/test_packed_weights.py"
MIXED = "tests/integration/test_cpu_mixed.py"
WINDOWS = f"{UNIT}/backends/test_windows.py"
LATENT = f"{UNIT}/backends/test_latent_rows.py"
GGUF = "tests/integration/test_families.py::test_a_gguf_file_gives_the_same_logits"
GGUF_FILES = f"{UNIT}/models/test_gguf_families.py"
MODULES = "tests/integration/test_mtp_mixtures.py"
GATED = "tests/integration/test_mtp_gated.py"

FAMILY_MUTANTS = (
    Mutant(
        90,
        "the correction that chooses experts counts in their weights, too",
        "backends/torch/experts.py",
        "route",
        "scores.gather",
        "choice.gather",
        (f"{ROUTING}::test_the_correction_chooses_but_does_not_count",),
    ),
    Mutant(
        90,
        "the weights of the taken experts are not normalised",
        "backends/torch/experts.py",
        "route",
        "spec.normalize",
        "False",
        (f"{ROUTING}::test_weights_sum_to_one_only_where_they_should",),
    ),
    Mutant(
        90,
        "ties of experts are broken as the sort likes",
        "backends/torch/experts.py",
        "_best",
        "scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]",
        "scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices[:, "
        ":count].neg().add(scores.shape[1] - 1)",
        (f"{ROUTING}::test_ties_go_to_the_lower_numbers",),
    ),
    Mutant(
        91,
        "a window is one position too long",
        "backends/torch/attention.py",
        "windowed",
        "seen > seen[..., -1:] - window",
        "seen >= seen[..., -1:] - window",
        (WINDOWS,),
    ),
    Mutant(
        91,
        "a window counts KV rows instead of the positions of a node's own path",
        "backends/torch/attention.py",
        "windowed",
        "view.visible.cumsum",
        "torch.ones_like(view.visible).cumsum",
        (WINDOWS,),
    ),
    Mutant(
        92,
        "latent attention turns the wrong part of a query",
        "backends/torch/latent.py",
        "latent_attention",
        "plain, turned = torch.split(heads, [latent.nope_dim, latent.rope_dim], dim=-1)",
        "turned, plain = torch.split(heads, [latent.rope_dim, latent.nope_dim], dim=-1)",
        (LATENT,),
    ),
    Mutant(
        92,
        "rotated pairs that stand side by side are taken as if they stood half apart",
        "models/formats/tensor_files.py",
        "RotatedRows.order",
        "one[-self.rotated:].reshape(-1, 2).T",
        "one[-self.rotated:].reshape(-1, 2)",
        (LATENT,),
    ),
    Mutant(
        93,
        "local layers turn like the others where the window is as long as the context",
        "models/formats/hf/config.py",
        "layer_specs",
        "local_rope if windowed[index] else None",
        "local_rope if windowed[index] and width else None",
        (f"{CONFIGS}::test_local_layers_turn_their_own_way_even_where_the_window_is_as_long_as_the_context",),
    ),
    Mutant(
        93,
        "zeros of GPTQ are taken as they are stored",
        "models/formats/hf/packed.py",
        "_unpack_gptq",
        "unpacked_bits(parts['qzeros'], bits, dim=1) + less",
        "unpacked_bits(parts['qzeros'], bits, dim=1)",
        (f"{PACKED}::test_every_matrix_holds_the_numbers_it_stands_for",),
    ),
    Mutant(
        93,
        "a file may count more experts than it holds",
        "models/formats/fields.py",
        "check_experts",
        "held != (experts.count if experts else 0)",
        "False",
        (f"{CONFIGS}::test_values_that_contradict_each_other_are_named",),
    ),
    Mutant(
        92,
        "what expands latent rows to keys is read from GGUF as if it were not transposed",
        "models/formats/gguf/checkpoint.py",
        "GgufCheckpoint._expanding",
        "parts[0].transpose(1, 2)",
        "parts[0].reshape(len(parts[0]), -1, parts[1].shape[2])",
        (f"{GGUF}[deepseek_v3]",),
    ),
    Mutant(
        92,
        "GGUF's factor on scores under YaRN is taken as it is stored",
        "models/formats/gguf/settings.py",
        "_yarn",
        "10 * fields.number('rope.scaling.yarn_log_multiplier')",
        "fields.number('rope.scaling.yarn_log_multiplier')",
        (f"{GGUF}[deepseek_v3]",),
    ),
    Mutant(
        93,
        "layers of modules that guess ahead count as the decoder's in GGUF",
        "models/formats/gguf/settings.py",
        "module_layers",
        "count - modules",
        "count",
        (f"{GGUF}[glm4_moe]",),
    ),
    Mutant(
        90,
        "what a GGUF file says of normalised weights does not count",
        "models/formats/gguf/settings.py",
        "hf_settings",
        "{key: value for key, value in (names.settings or {}).items() if values.get(key) is None}",
        "{key: value for key, value in (names.settings or {}).items()}",
        (f"{GGUF}[deepseek_v3]",),
    ),
    Mutant(
        90,
        "a router of GGUF scores by softmax whatever the file says",
        "models/formats/gguf/settings.py",
        "",
        "Scores.SIGMOID",
        "Scores.SOFTMAX",
        (f"{GGUF}[deepseek_v3]",),
    ),
    Mutant(
        93,
        "parts of latent rows that do not fit each other are put together",
        "models/formats/gguf/checkpoint.py",
        "GgufCheckpoint._expanding",
        "not fit",
        "False",
        (f"{GGUF_FILES}::test_both_parts_of_what_expands_latent_rows_must_fit",),
    ),
    Mutant(
        92,
        "rotated pairs of a module's latent attention are not put in order",
        "models/heads/opening.py",
        "Head.load",
        "self.spec.interleaved",
        "False",
        (f"{MODULES}::test_what_a_module_says_is_what_it_should",),
    ),
    Mutant(
        92,
        "heads of a module turn whole where a part of them should",
        "models/heads/layouts/mtp.py",
        "_layer_of",
        "rope_spec(fields, family.rope, layer.attention.rotary_dim)",
        "RopeSpec(rope_spec(fields, family.rope, layer.attention.rotary_dim).theta)",
        (f"{MODULES}::test_what_a_module_says_is_what_it_should",),
    ),
    Mutant(
        93,
        "a module may count more experts than it holds",
        "models/heads/layouts/mtp.py",
        "_layer_of",
        "[layer]",
        "[]",
        (f"{MODULES}::test_experts_that_are_not_there_are_missed_before_they_cost_anything",),
    ),
    Mutant(
        92,
        "what gated attention saw is not weighed",
        "backends/torch/layers.py",
        "TorchLayers._attended",
        "seen * gate.sigmoid()",
        "seen",
        (f"{GATED}::test_what_a_gated_module_says_is_what_it_should",),
    ),
    Mutant(
        92,
        "norms of a gated module are taken as they are stored",
        "models/heads/opening.py",
        "Head.load",
        "self.files.load(name) + 1",
        "self.files.load(name)",
        (f"{GATED}::test_what_a_gated_module_says_is_what_it_should",),
    ),
    Mutant(
        93,
        "8-bit floats of a module are read without their scales",
        "models/heads/files.py",
        "HeadFiles._floats",
        "if parts:\n    return self._unpacked(name, stored, parts)",
        "if False:\n    return self._unpacked(name, stored, parts)",
        (f"{MODULES}::test_a_module_in_8_bit_floats_is_unpacked",),
    ),
    Mutant(
        93,
        "whole numbers beyond a double crash the reader of a config",
        "models/formats/fields.py",
        "is_positive_number",
        "0 < value <= sys.float_info.max",
        "0 < float(value) <= sys.float_info.max",
        (f"{CONFIGS}::test_a_hostile_value_is_one_clear_line_or_harmless",),
    ),
    Mutant(
        93,
        "what a layer says is not scaled on the CPU kernels",
        "backends/cpu/weights.py",
        "native_decoder",
        "spec.residual_scale",
        "1.0",
        (f"{MIXED}::test_logits_equal_torch",),
    ),
    Mutant(
        93,
        "norms behind both halves of a layer are exchanged on the CPU kernels",
        "backends/cpu/weights.py",
        "_load_layer",
        "CpuLayer(attention_norm=norm(norms.before_attention), mlp_norm=norm(norms.before_mlp), "
        "matrices=[*matrices('self_attn.q_proj self_attn.k_proj self_attn.v_proj', "
        "layer.attention.bias), *matrices('self_attn.o_proj', layer.attention.output_bias), *mlp], "
        "query_norm=norm('self_attn.q_norm' if layer.attention.qk_norm else None), "
        "key_norm=norm('self_attn.k_norm' if layer.attention.qk_norm else None), experts=experts, "
        "after_attention=norm(norms.after_attention), after_mlp=norm(norms.after_mlp), "
        "sinks=packer.vector(f'{prefix}self_attn.sinks') if layer.attention.sinks else None)",
        "CpuLayer(attention_norm=norm(norms.before_attention), mlp_norm=norm(norms.before_mlp), "
        "matrices=[*matrices('self_attn.q_proj self_attn.k_proj self_attn.v_proj', "
        "layer.attention.bias), *matrices('self_attn.o_proj', layer.attention.output_bias), *mlp], "
        "query_norm=norm('self_attn.q_norm' if layer.attention.qk_norm else None), "
        "key_norm=norm('self_attn.k_norm' if layer.attention.qk_norm else None), experts=experts, "
        "after_attention=norm(norms.after_mlp), after_mlp=norm(norms.after_attention), "
        "sinks=packer.vector(f'{prefix}self_attn.sinks') if layer.attention.sinks else None)",
        (f"{MIXED}::test_logits_equal_torch",),
    ),
    Mutant(
        91,
        "a window is one position too long on the CPU kernels",
        "backends/cpu/weights.py",
        "native_decoder",
        "spec.attention.window or 0",
        "(spec.attention.window or -1) + 1",
        (f"{MIXED}::test_logits_equal_torch",),
    ),
    Mutant(
        93,
        "local layers turn like the others on the CPU kernels",
        "backends/cpu/weights.py",
        "native_decoder",
        "ropes[spec.attention.rope]",
        "0",
        (f"{MIXED}::test_logits_equal_torch",),
    ),
    Mutant(
        93,
        "attention scores are not squashed on the CPU kernels",
        "backends/cpu/weights.py",
        "native_decoder",
        "spec.attention.softcap or 0.0",
        "0.0",
        (f"{MIXED}::test_logits_equal_torch",),
    ),
)
