"""A model on two ranks: the same texts however it guesses, the same bits again, and what happens when a rank fails."""

import os
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foreword import LLM
from foreword.acceptance.params import SamplingParams
from foreword.backends.batch import ForwardBatch
from foreword.backends.parallel.decoder import TensorParallelDecoder
from foreword.backends.parallel.workers import RankFault, Workers
from foreword.backends.runner import ModelRunner
from foreword.control.fixed import FixedPolicy
from foreword.engine.core import EngineCore
from foreword.errors import EngineStopped, RequestError
from foreword.kv.paged_cache import PagedCache
from foreword.models.adapters import Lora, open_adapter
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftRequest
from foreword.speculation.requests import PassEntry
from foreword.speculation.transaction import Transaction
from helpers.adapters import ALL, adapter_tensors, write_adapter
from helpers.engines import ask, core_on
from helpers.passes import adapted_logits, all_logits, compute, make_request, torch_decoder
from helpers.ranks import PlantedError, fail_once, on_ranks, start_ranks
from helpers.scripted_drafters import RandomTreeDrafter
from helpers.scripted_target import ScriptDrafter
from helpers.tiny_heads import TinyHead
from helpers.tiny_models import TINY_VOCAB, write_gguf
from helpers.trees import random_tokens
from helpers.waiting import wait_until

IDS = random_tokens(random.Random(1), 40)
PROMPTS = [IDS[:5], IDS[:35], [*IDS[:33], 7, 8], IDS[20:]]
"""Two of them begin alike, with two full pages."""

PARAMS = [SamplingParams(temperature=t, seed=7, max_tokens=20, ignore_eos=True) for t in (0, 0.8)]
ASKED = [(prompt, params) for params in PARAMS for prompt in PROMPTS]


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Workers]:
    workers = start_ranks()
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def decoder(tiny_model: Path, two_ranks: Workers) -> TensorParallelDecoder:
    return on_ranks(tiny_model, two_ranks)


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert float((ours - theirs).abs().max()) <= 1e-4 * float(theirs.abs().max())


def texts(
    decoder: TensorParallelDecoder, drafter: Drafter | None = None, preempt_at: Sequence[int] = ()
) -> tuple[list[list[int]], EngineCore]:
    """What all prompts are answered, two after the others so that they find their beginnings."""
    core = core_on(
        decoder, policy=FixedPolicy(drafter, 8 if drafter else 0, 4), kv_cache_memory_bytes=1 << 17
    )
    requests, waiting = [], list(ASKED)
    for step in range(1000):
        if waiting and step % 2 == 0:
            requests.append(ask(core, *waiting.pop(0)))
        if not core.has_requests:
            break
        core.step()
        if step in preempt_at:
            core.scheduler.preempt(core.scheduler.running[-1])
    core.check_integrity()
    return [request.tokens[request.prompt_len :] for request in requests], core


def test_guesses_on_two_ranks_do_not_change_their_text(decoder: TensorParallelDecoder):
    """Chains and trees, rows that move, beginnings that are found, requests that are put back."""
    plain, _ = texts(decoder)
    answers = {
        (tuple(prompt), params.temperature): text for (prompt, params), text in zip(ASKED, plain, strict=True)
    }

    def truth(request: DraftRequest, place: int) -> int:
        prompt = tuple(request.tokens[: request.prompt_len])
        for temperature in (0, 0.8):
            text = answers[prompt, temperature]
            if text[: len(request.tokens) - request.prompt_len] == request.tokens[request.prompt_len :]:
                return text[place] if place < len(text) else 0
        raise AssertionError("a text has changed")

    def follows(tokens: Sequence[int], request: DraftRequest) -> int:
        return truth(request, len(tokens) - request.prompt_len)

    for drafter in (
        ScriptDrafter(truth, TINY_VOCAB, seed=1),
        RandomTreeDrafter(follows, TINY_VOCAB, truth=0.7, seed=2),
    ):
        guessed, core = texts(decoder, drafter, preempt_at=(6, 9, 13))
        assert guessed == plain
        assert core.stats().prefix_hits
        assert core.scheduler.preemptions
        assert sum(accepted for _, _, accepted in core.stats().acceptance.values())
        assert not core.faults


def test_the_same_bits_again(tiny_model: Path, two_ranks: Workers, decoder: TensorParallelDecoder):
    again = on_ranks(tiny_model, two_ranks)
    assert torch.equal(all_logits(again, IDS), all_logits(decoder, IDS))


def test_a_gguf_file_in_blocks(tiny_model: Path, two_ranks: Workers, tmp_path: Path):
    path = write_gguf(tiny_model, tmp_path / "model.gguf", "Q8_0")
    assert_near(all_logits(on_ranks(path, two_ranks), IDS), all_logits(torch_decoder(path), IDS))


def test_some_layers_of_it(tiny_model: Path, decoder: TensorParallelDecoder):
    one = torch_decoder(tiny_model)
    assert_near(all_logits(decoder.with_layers([1]), IDS), all_logits(one.with_layers([1]), IDS))
    with pytest.raises(RequestError, match="cannot run with tensor parallelism"):
        decoder.beside(open_checkpoint(tiny_model))


def test_adapters_are_shared_too(tiny_model: Path, decoder: TensorParallelDecoder, tmp_path: Path):
    one = torch_decoder(tiny_model)
    tensors = adapter_tensors(4, ALL, config=one.config)
    lora = open_adapter(write_adapter(tmp_path / "lora", tensors=tensors), one.config)
    parts = [(1, IDS), (0, IDS[:9])]
    for target in (one, decoder):
        target.set_adapter(1, lora)
    for ours, theirs in zip(adapted_logits(decoder, parts), adapted_logits(one, parts), strict=True):
        assert_near(ours, theirs)
    decoder.set_adapter(1, None)


def test_a_head_gets_the_whole_embedding(tiny_model: Path, decoder: TensorParallelDecoder):
    assert torch.equal(decoder.heads._weights.embedding, torch_decoder(tiny_model).weights.embedding)


def next_logits(runner: ModelRunner, cache: PagedCache, request) -> torch.Tensor:
    with Transaction(cache, [PassEntry.of(request, 1)]) as transaction:
        return runner.forward(transaction.batch([Draft()])).logits[0]


def test_rows_are_moved_at_all_ranks(decoder: TensorParallelDecoder):
    """Between passes, as heads want it."""
    cache = PagedCache(2)
    runner = ModelRunner.allocate(decoder, 2, cache.page_size)
    request = make_request(cache, IDS[:12])
    compute(runner, cache, request, 11)
    before = next_logits(runner, cache, request)
    (page,) = request.kv.pages
    first, second = page * cache.page_size, (1 - page) * cache.page_size
    runner.store.move(torch.tensor([(first + row, second + row) for row in range(11)], dtype=torch.int32))
    request.kv.pages[0] = 1 - page
    assert torch.equal(next_logits(runner, cache, request), before)


def one_pass(decoder: TensorParallelDecoder, **changes: object) -> torch.Tensor:
    cache = PagedCache(4)
    runner = ModelRunner.allocate(decoder, 4, cache.page_size)
    with Transaction(cache, [PassEntry.of(make_request(cache, IDS), len(IDS))]) as transaction:
        batch: ForwardBatch = transaction.batch([Draft()])
        return runner.forward(replace(batch, **changes)).logits


def test_what_the_pass_before_has_drawn_is_known_at_all_ranks(decoder: TensorParallelDecoder):
    expected = one_pass(decoder)
    ids = torch.tensor(IDS, dtype=torch.int32)
    ids[3], ids[5] = -2, -1
    cache = PagedCache(4)
    store = decoder.new_kv_store(4, cache.page_size)
    with Transaction(cache, [PassEntry.of(make_request(cache, IDS), len(IDS))]) as transaction:
        batch = replace(transaction.batch([Draft()]), token_ids=ids)
        drawn = torch.tensor([IDS[5], IDS[3]])
        assert torch.equal(decoder.forward(replace(batch, drawn_before=drawn), store).logits, expected)


def test_a_pass_that_fails_at_one_rank_leaves_all_in_step(decoder: TensorParallelDecoder):
    expected = one_pass(decoder)
    for layer in (0, 1):
        fail_once(decoder, layer)
        with pytest.raises(PlantedError):
            one_pass(decoder)
        assert torch.equal(one_pass(decoder), expected)
    own = decoder._first_rank
    own._adapters[5] = Lora({})  # which the other rank does not know
    with pytest.raises(RankFault, match="rank 1 of 2: KeyError"):
        one_pass(decoder, adapters=(5,))
    del own._adapters[5]
    assert torch.equal(one_pass(decoder), expected)


def test_a_pass_that_cannot_begin_at_one_rank_leaves_all_in_step(decoder: TensorParallelDecoder):
    expected = one_pass(decoder)
    cache = PagedCache(4)
    store = decoder.new_kv_store(4, cache.page_size)
    store.number += 1000  # which the other rank does not know
    with Transaction(cache, [PassEntry.of(make_request(cache, IDS), len(IDS))]) as transaction:
        batch = transaction.batch([Draft()])
        with pytest.raises(RankFault, match="rank 1 of 2: KeyError"):
            decoder.forward(batch, store)
    assert torch.equal(one_pass(decoder), expected)


def test_an_engine_recovers_from_a_pass_that_failed(decoder: TensorParallelDecoder):
    def answered(fails: bool) -> list[int]:
        core = core_on(decoder, kv_cache_memory_bytes=1 << 17)
        request = ask(core, IDS[:9], PARAMS[0])
        core.step()
        if fails:
            fail_once(decoder, 1)
        while core.has_requests:
            core.step()
        assert core.faults["step"] == int(fails)
        return request.tokens

    assert answered(fails=True) == answered(fails=False)


def test_what_is_dropped_is_dropped_at_all_ranks(two_ranks: Workers, decoder: TensorParallelDecoder):
    store = decoder.new_kv_store(2, 16)
    number = store.number
    del store
    assert number in two_ranks._released
    one_pass(decoder)
    assert number not in two_ranks._released


def test_a_killed_rank_ends_the_others_and_is_named(tiny_model: Path):
    workers = start_ranks()
    decoder = on_ranks(tiny_model, workers)
    heard: list[str] = []
    decoder.when_lost(heard.append)
    (victim,) = workers._processes
    core = core_on(decoder, kv_cache_memory_bytes=1 << 17)
    request = ask(core, IDS[:9], PARAMS[0])
    core.step()
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(EngineStopped, match=rf"rank 1 \(process {victim.pid}\) was killed by SIGKILL"):
        while core.has_requests:
            core.step()
    assert request.finish_reason is None  # nothing was made up
    workers.close()
    wait_until(lambda: heard)
    assert len(heard) == 1  # whoever noticed it first has told it
    assert "was killed by SIGKILL" in heard[0]
    with pytest.raises(EngineStopped, match="SIGKILL"):
        one_pass(decoder)


def test_a_size_that_does_not_fit_is_refused_before_anything_is_started(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Workers, "_start_worker", None)
    with pytest.raises(RequestError, match="does not fit this llama model: it has 4 heads; use 1 or 2 or 4"):
        LLM(str(tiny_model), device="cpu", tensor_parallel_size=3)
    with pytest.raises(RequestError, match="leave out --backend cpu"):
        LLM(str(tiny_model), device="cpu", backend="cpu", tensor_parallel_size=2)


@pytest.mark.slow
def test_of_three_ranks_the_dead_one_is_named_and_the_others_end():
    workers = start_ranks(3)
    heard: list[str] = []
    workers.when_lost(heard.append)
    first, second = workers._processes
    second.kill()
    wait_until(lambda: heard)
    assert heard[0].startswith(f"rank 2 (process {second.pid}) was killed by SIGKILL")
    assert "\n" not in heard[0]
    assert first.stdin is not None
    first.stdin.close()  # as the end of the driver does
    wait_until(lambda: first.poll() is not None)
    assert first.returncode == 0
    workers.close()


@pytest.mark.slow
def test_drafters_of_all_kinds_guess_for_two_ranks(tiny_model: Path, tmp_path: Path):
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    eagle3 = TinyHead(360, draft_vocab=200).eagle3().save(tmp_path / "e3", draft_vocab_size=200, **layers)
    settings = [
        {"method": "ngram", "prompt_lookup_min": 1},
        {"method": "draft_model", "model": str(tiny_model)},
        {"method": "draft_model", "model": str(tiny_model), "tree_width": 3},
        {"method": "layer_skip"},
        {"method": "sparse_kv", "sink_tokens": 0, "window_tokens": 8, "top_tokens": 0},
        {"method": "sparse_kv", "sink_tokens": 0, "window_tokens": 8, "top_tokens": 128, "refresh_tokens": 4},
        {"model": str(TinyHead(360).eagle().save(tmp_path / "eagle"))},
        {"model": str(eagle3), "tree_width": 3},
    ]
    llm = LLM(str(tiny_model), device="cpu", tensor_parallel_size=2, speculation=None)
    prompts = [{"prompt_token_ids": prompt * 5} for prompt in PROMPTS]
    plain = [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS[1])]
    for setting in settings:
        llm.speculate({**setting, "fixed": True})
        outputs = llm.generate(prompts, PARAMS[1])
        assert [output.outputs[0].token_ids for output in outputs] == plain, setting
        assert sum(output.timings.draft_n for output in outputs), setting
    with pytest.raises(RequestError, match="fewer bits cannot run with tensor parallelism"):
        llm.speculate({"method": "self_quantized"})
    (worker,) = llm.loaded.decoder.workers._processes  # type: ignore[attr-defined]
    llm.close()
    assert worker.returncode == 0
