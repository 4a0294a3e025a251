"""Puts the policy file beside a loaded model."""

from dataclasses import replace
from pathlib import Path
from time import perf_counter

from foreword import __version__
from foreword.control.measured import MeasuredPolicy
from foreword.engine.config import EngineConfig
from foreword.engine.loader import LoadedModel
from foreword.engine.policy.steering import Steering


def make_steering(config: EngineConfig, policy: MeasuredPolicy, loaded: LoadedModel) -> Steering | None:
    """None without a file; raises `RequestError` for one that says nonsense."""
    if config.speculation_policy is None:
        return None
    decoder, name = loaded.decoder, loaded.checkpoint.path.name
    made_for = {"model": name, "device": str(decoder.device), "version": __version__}
    return Steering(
        Path(config.speculation_policy).expanduser(),
        policy,
        perf_counter,
        made_for | {"bytes": str(decoder.weight_bytes)},
        name,
        decoder.is_shape_invariant,
    )


def with_file_limits(config: EngineConfig, steering: Steering) -> EngineConfig:
    """What the file says of the engine as a whole; it is looked at once."""
    share = steering.document.max_draft_share
    return config if share is None else replace(config, max_draft_share=share)
