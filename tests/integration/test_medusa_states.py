"""The state that Medusa guesses from is that of its text, whatever happened to the request."""

import random
from pathlib import Path

import pytest
import torch

from foreword.acceptance.params import SamplingParams
from foreword.control.fixed import FixedPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.engine.config import EngineConfig, EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.loader import load_model
from foreword.engine.messages import NewRequest
from helpers.slow_heads import target_states
from helpers.taught_heads import hf_target
from helpers.tiny_heads import TinyHead

SYSTEM = tuple(range(30, 64))


@pytest.mark.parametrize("choices", [None, "measured"])
def test_states_are_those_of_the_text(tiny_model: Path, tmp_path: Path, choices: str | None):
    """Through chunks, forks, preemptions, prefix hits, aborts and failures."""
    path = TinyHead(360).medusa(4).save(tmp_path / "medusa")
    form = {"method": "medusa", "model": str(path), "num_speculative_tokens": 6, "tree_width": 2}
    form |= {} if choices is None else {"medusa_choices": choices}
    model = load_model(str(tiny_model), dtype="float32", device="cpu", backend="torch")
    config = SpeculationConfig.parse(form)
    guard = model.build_drafter(config)
    sizes = EngineConfig(max_num_batched_tokens=48, max_num_seqs=4, max_draft_share=100.0)
    policy = FixedPolicy(guard, config.num_speculative_tokens, config.max_depth)
    core = EngineCore(model.decoder, model.vocabulary(), EngineParts(sizes, policy))
    target, rng, drafter = hf_target(tiny_model), random.Random(2), guard._drafter
    coming, compared = 10, 0
    while coming or core.has_requests:
        if coming and rng.random() < 0.4:
            coming -= 1
            prompt = (*SYSTEM, 5 * coming) if coming % 3 else tuple(rng.choices(range(3, 360), k=90))
            params = SamplingParams(
                temperature=0.7, seed=coming, max_tokens=14, n=rng.choice((1, 2)), ignore_eos=True
            )
            core.add(NewRequest(f"r{coming}", prompt, params))
        if core.scheduler.running and rng.random() < 0.1:
            core.scheduler.preempt(rng.choice(core.scheduler.running))
        if rng.random() < 0.05:
            core.abort(f"r{coming}")
        core.step()
        for request in core.scheduler.running:
            state = drafter._states.get(request.request_id)
            if (
                state is None
                or state.epoch != request.drafter_view.epoch
                or state.end != len(request.tokens) - 1
            ):
                continue
            if rng.random() < 0.3:
                expected = target_states(target, request.tokens[:-1], (), normed=True)[-1:]
                torch.testing.assert_close(state.hidden, expected, atol=1e-4, rtol=1e-4)
                compared += 1
    assert compared > 20
    assert not drafter._states
    assert not guard.faults
    assert core.scheduler.preemptions > 0
    assert core.cache.prefix_hits > 0
