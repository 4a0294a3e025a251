"""Creates an engine for a loaded model: policy file, drafters, prepared passes, and saved or measured costs."""

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Unpack

from foreword import __version__
from foreword.control.policy import MeasuredPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.engine.config import EngineConfig, EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.drafting.default_speculation import SpeculationOption, check_choice
from foreword.engine.loader import LoadedModel, LoadOptions, load_model
from foreword.engine.policy.controller import PolicyFileController
from foreword.engine.preparing import prepare_passes
from foreword.engine.profiles import load_or_measure_costs, restore_estimates
from foreword.kv.spare_rows import SpareRows
from foreword.paths import user_path
from foreword.progress import Progress


def open_policy_file(
    config: EngineConfig, policy: MeasuredPolicy, loaded: LoadedModel
) -> PolicyFileController | None:
    """Read the policy file and return its controller; None without a file. Raise `RequestError` if it is invalid."""
    if config.speculation_policy is None:
        return None
    decoder, name = loaded.decoder, loaded.checkpoint.path.name
    environment = {
        "model": name,
        "device": str(decoder.device),
        "version": __version__,
        "bytes": str(decoder.weight_bytes),
    }
    path = user_path(config.speculation_policy)
    return PolicyFileController(path, policy, perf_counter, environment, name, decoder.is_shape_invariant)


def make_core(
    loaded: LoadedModel,
    config: EngineConfig | None,
    speculation: SpeculationOption = None,
    offered: Sequence[SpeculationConfig] = (),
    preparing: Progress | None = None,
) -> EngineCore:
    """Create an engine for a loaded model, prepare its passes, and restore or measure its costs.

    `preparing` receives the progress of GPU graph capture. `offered` are drafters that requests may name later; those
    of the policy file are added.
    """
    config, policy = config or EngineConfig(), MeasuredPolicy()
    chosen = loaded.choose_speculation(speculation, config.acceptance_rule).config
    policy_file = open_policy_file(config, policy, loaded)
    if policy_file is not None:
        if (share := policy_file.document.max_draft_share) is not None:
            config = replace(config, max_draft_share=share)
        offered = [*offered, *policy_file.configs.values()]
    spare_rows = SpareRows()
    parts = EngineParts(
        config,
        policy,
        loaded.drafter_builder(spare_rows),
        chosen,
        offered=offered,
        policy_file=policy_file,
        spare_rows=spare_rows,
    )
    core = EngineCore(loaded.decoder, loaded.vocabulary(), parts)
    prepare_passes(core, config.max_num_seqs, preparing)
    # Drafters with a fixed depth need neither estimates nor costs.
    if policy_file is not None or (chosen is not None and not chosen.fixed):
        core.saved_estimates = restore_estimates(core, policy, offered)
    elif any(not drafter.fixed for drafter in offered):
        load_or_measure_costs(core, offered)
    return core


def load_core(
    model: str,
    config: EngineConfig | None,
    speculation: SpeculationOption,
    preparing: Progress | None,
    **options: Unpack[LoadOptions],
) -> tuple[LoadedModel, EngineCore]:
    """Load a model and create its engine; raise `RequestError` for an invalid `speculation` before loading."""
    check_choice(speculation)
    loaded = load_model(model, enforce_eager=config is not None and config.enforce_eager, **options)
    return loaded, make_core(loaded, config, speculation, preparing=preparing)
