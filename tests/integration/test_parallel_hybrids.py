"""Models with recurrent layers on two ranks: the logits of one, and texts that drafts do not change."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from foreword.acceptance.params import SamplingParams
from foreword.backends.parallel.shards import check_size
from foreword.backends.parallel.workers import Workers
from foreword.control.fixed import FixedPolicy
from foreword.errors import RequestError
from foreword.kv.chunks import CHUNK
from foreword.models.adapters import layer_modules, open_adapter
from foreword.speculation.drafting import Drafter, DraftRequest
from helpers.adapters import adapter_tensors, write_adapter
from helpers.engines import ask, core_on
from helpers.passes import adapted_logits, all_logits, torch_decoder
from helpers.ranks import PlantedError, fail_once, on_ranks, start_ranks
from helpers.scripted_drafters import RandomTreeDrafter
from helpers.tiny_families import family_config, make_family
from helpers.tiny_models import TINY_VOCAB
from helpers.trees import random_tokens

IDS = random_tokens(random.Random(2), CHUNK + 9)
FAMILIES = ["qwen3_next", "granite_hybrid", "nemotron_h", "lfm2"]
"""With the norm of a recurrence by head, over all heads and by groups, and without one."""


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Workers]:
    workers = start_ranks()
    yield workers
    workers.close()


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert float((ours - theirs).abs().max()) <= 1e-4 * float(theirs.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_one_rank_with_adapters_too(family: str, tmp_path: Path, two_ranks: Workers):
    path, _ = make_family(tmp_path / "model", family)
    one, two = torch_decoder(path), on_ranks(path, two_ranks)
    assert_near(all_logits(two, IDS), all_logits(one, IDS))
    of_layers = [layer_modules(one.config, layer) for layer in range(one.config.num_layers)]
    modules = sorted({module.rsplit(".", 1)[1] for found in of_layers for module in found})
    tensors = adapter_tensors(4, modules, config=one.config)
    lora = open_adapter(write_adapter(tmp_path / "lora", modules=modules, tensors=tensors), one.config)
    for decoder in (one, two):
        decoder.set_adapter(1, lora)
    parts = [(1, IDS), (0, IDS[:9])]
    for ours, theirs in zip(adapted_logits(two, parts), adapted_logits(one, parts), strict=True):
        assert_near(ours, theirs)


@pytest.mark.parametrize("family", ["granite_hybrid", "nemotron_h"])
def test_drafts_change_no_text_and_a_failed_pass_leaves_the_ranks_in_step(
    family: str, tmp_path: Path, two_ranks: Workers
):
    path, _ = make_family(tmp_path, family)
    decoder = on_ranks(path, two_ranks)

    def texts(drafter: Drafter | None, disturbed: bool = False) -> list[list[int]]:
        core = core_on(
            decoder, policy=FixedPolicy(drafter, 8 if drafter else 0, 4), kv_cache_memory_bytes=1 << 22
        )
        params = [SamplingParams(temperature=t, seed=7, max_tokens=24, ignore_eos=True) for t in (0, 0.8)]
        requests = [ask(core, IDS[: CHUNK - 6], one) for one in params]
        for step in range(200):
            if disturbed and step == 2:
                fail_once(decoder, 1)
            if disturbed and step == 4:
                core.scheduler.preempt(core.scheduler.running[-1])
            if not core.has_requests:
                break
            core.step()
        core.check_integrity()
        assert bool(core.faults) == disturbed
        assert disturbed == bool(sum(accepted for _, _, accepted in core.stats().acceptance.values()))
        return [request.tokens[request.prompt_len :] for request in requests]

    plain = texts(None)

    def truth(tokens: Sequence[int], request: DraftRequest) -> int:
        said = [*tokens[request.prompt_len :]]
        text = next(text for text in [*plain, said] if text[: len(said)] == said)
        return text[len(said)] if len(said) < len(text) else 0

    drafter = RandomTreeDrafter(truth, TINY_VOCAB, truth=0.7, seed=2)
    assert texts(drafter, disturbed=True) == plain
    with pytest.raises(PlantedError):
        fail_once(decoder, 0)
        all_logits(decoder, IDS)
    assert_near(all_logits(decoder, IDS), all_logits(torch_decoder(path), IDS))


@pytest.mark.parametrize(
    ("family", "size", "line"),
    [
        ("qwen3_next", 64, "recurrent heads"),
        ("nemotron_h", 4, "it has 2 norm groups in recurrent layers"),
        ("lfm2", 3, "it has convolutions of width"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(family: str, size: int, line: str):
    with pytest.raises(RequestError, match=line):
        check_size(family_config(family), size)
