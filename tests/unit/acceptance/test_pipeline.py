"""Logits to distributions: each row with its own history, in any company, natively and in torch."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from foreword.acceptance.batch import Judgement, RowStatus
from foreword.acceptance.distribution import RowParams, best_of_all, distributions, draw, sample, shape_rows
from foreword.acceptance.judge import draw_rows, judge
from foreword.acceptance.noise import GAMMA, MIX_A, MIX_B, Stream, extend_keys, key_tensor, stems
from foreword.acceptance.params import SamplingParams
from foreword.acceptance.reference import probabilities
from foreword.acceptance.request import RECORD
from foreword.acceptance.rules.rule import Rule
from foreword.kernels import sampler as native
from foreword.proofs.cases import Case, random_case, target_logits
from foreword.proofs.coupled import likely_tree
from foreword.speculation.draft import Draft
from helpers import rule_reference as reference
from helpers.judging import PLAIN, dense_probabilities, judgement, sampler
from helpers.masked_rows import MaskedRows


@pytest.fixture(params=["native", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(native, "native_sampler", lambda: None)
    elif native.native_sampler() is None:
        pytest.skip("the native extension is not built")
    return request.param


def batch_of(cases: Sequence[Case], rng: np.random.Generator) -> tuple[Judgement, list[list[list[int]]]]:
    """Random trees for the cases, all in one batch, and the generated tokens up to every row."""
    drafts, histories, samplers = [], [], []
    for case in cases:
        tree = likely_tree(rng, case.limits.vocab_size, [])
        drafts.append(Draft(tuple(tree.tokens), tuple(tree.parents)))
        generated = [int(t) for t in rng.integers(0, case.limits.vocab_size, rng.integers(0, 5))]
        histories.append([[*generated, *tree.path(node)] for node in range(-1, len(tree.tokens))])
        samplers.append(case.sampler())
        samplers[-1].commit(generated)
    seen = [[[*c.prompt, *g] for g in mine] for c, mine in zip(cases, histories, strict=True)]
    return judgement(target_logits(cases, seen), drafts, samplers), histories


def test_every_row_has_the_distribution_of_the_reference(backend: str):
    rng = np.random.default_rng(3)
    for _ in range(12):
        cases = [random_case(rng) for _ in range(20)]
        judged, histories = batch_of(cases, rng)
        dense = dense_probabilities(judged)
        row = 0
        for case, mine in zip(cases, histories, strict=True):
            for generated in mine:
                logits = judged.logits[row].tolist()
                expected = probabilities(logits, case.params, case.limits, case.prompt, generated)
                assert dense[row, : len(expected)] == pytest.approx(expected, abs=1e-12), (case, generated)
                assert not dense[row, len(expected) :].any()
                row += 1


def test_judging_changes_neither_logits_nor_q(backend: str):
    rng = np.random.default_rng(5)
    judged, _ = batch_of([random_case(rng) for _ in range(30)], rng)
    before, q = judged.logits.clone(), judged.trees.q.probs.copy()
    judge(judged)
    assert torch.equal(judged.logits, before)
    assert np.array_equal(judged.trees.q.probs, q)


@pytest.mark.parametrize("vocab", [5, 64, 1003, 49152])
def test_native_and_torch_agree(vocab: int):
    if native.native_sampler() is None:
        pytest.skip("the native extension is not built")
    generator = torch.Generator().manual_seed(vocab)
    rows = 24
    logits = torch.randn(rows, vocab, generator=generator) * torch.linspace(0.01, 6, rows)[:, None]
    logits[3, vocab // 2 :] = -torch.inf
    logits[4] = logits[4].round()
    logits[5] = 0.0
    rng = np.random.default_rng(vocab)
    shape = RowParams(
        torch.from_numpy(rng.choice([0.0, 0.2, 0.7, 1.0, 2.0], rows)),
        torch.from_numpy(rng.choice([vocab, 1, 3, max(1, vocab // 2)], rows)),
        torch.from_numpy(rng.choice([1.0, 0.9, 0.5, 0.999999, 1e-6], rows)),
        torch.from_numpy(rng.choice([0.0, 0.0, 0.1, 1.0], rows)),
    )
    keys = extend_keys(stems(11, 0, Stream.TARGET, 0), np.arange(rows))
    natively = shape_rows(logits, shape, native.sampler_for(logits))
    tokens = draw(natively, keys)
    slowly = shape_rows(logits, shape, None)
    assert torch.equal(natively.floor, slowly.floor)
    assert torch.equal(natively.peak, slowly.peak)
    assert torch.equal(natively.greedy_token, slowly.greedy_token)
    assert torch.equal(tokens, draw(slowly, keys))
    assert torch.equal(tokens, best_of_all(slowly, key_tensor(keys)))  # as devices do it


def test_the_sampler_is_chosen_once_for_all_rules(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(8)
    judged, _ = batch_of([random_case(rng) for _ in range(40)], rng)
    asked = []
    monkeypatch.setattr(native, "sampler_for", lambda logits: asked.append(len(logits)))
    chains = judgement(judged.logits, [PLAIN] * len(judged.logits), [judged.samplers[0]] * len(judged.logits))
    chains.records["rule"] = np.resize([Rule.COUPLED, Rule.TOKEN, Rule.BLOCK], len(chains.records))
    judge(chains)
    assert asked == [len(judged.logits)]


def test_one_native_call_is_floors_and_draw_of_torch(monkeypatch: pytest.MonkeyPatch):
    if native.native_sampler() is None:
        pytest.skip("the native extension is not built")
    rng = np.random.default_rng(21)
    judged, _ = batch_of([random_case(rng) for _ in range(200)], rng)
    judged.wants_draws = True  # after every row
    logits = judged.logits.clone()
    for row, poison in ((3, torch.nan), (9, torch.inf)):
        logits[row, 2] = poison
    logits[17] = -torch.inf
    natively = draw_rows(judged, logits)
    assert judged.sampler is not None
    monkeypatch.setattr(native, "native_sampler", lambda: None)
    judged = replace(judged)
    slowly = draw_rows(judged, logits)
    assert natively.tolist() == slowly.tolist()
    assert natively[:, [3, 9, 17]].tolist() == [[-1, -1, -1], [1, 1, 2]]
    keys = extend_keys(judged.row_records["stem"], judged.positions)
    assert torch.equal(slowly, sample(logits, RowParams.of(judged), keys))


def unmixed(bits: int) -> int:
    """What the noise's last step makes these bits of."""
    mask = (1 << 64) - 1
    for shift, factor in ((31, MIX_B), (27, MIX_A), (30, 1)):
        word = bits
        for _ in range(3):
            word = bits ^ word >> shift
        bits = word * pow(factor, -1, 1 << 64) & mask
    return bits


def test_the_luckiest_token_is_found_wherever_it_stands():
    """One that needs 36 leading ones, and has 45: such noise is not met by chance."""
    if (sampler := native.native_sampler()) is None:
        pytest.skip("the native extension is not built")
    vocab, mask = 3 * 32 + 7, (1 << 64) - 1
    bits = mask ^ mask >> 45
    keys = [(unmixed(bits) - (token + 1) * GAMMA) & mask for token in range(vocab)]
    assert [reference.bits(key, token) for token, key in enumerate(keys)] == [bits] * vocab
    logits = torch.full((vocab, vocab), -25.0)
    logits[:, 5] = 0.0
    ones = torch.ones(vocab, dtype=torch.float64)
    drawn = native.draw(
        sampler,
        logits,
        torch.zeros(vocab),
        torch.full((vocab,), -1e30),
        ones,
        torch.full((vocab,), -1),
        torch.from_numpy(np.array(keys, np.uint64).view(np.int64)),
    )
    assert drawn.tolist() == list(range(vocab))


def test_noise_that_is_just_enough_is_found_and_just_too_little_is_not():
    """Tokens are skipped by the leading ones of their noise: gaps around what k ones, a zero and ones make up for."""
    if (sampler := native.native_sampler()) is None:
        pytest.skip("the native extension is not built")
    vocab, mask, token = 3 * 32 + 7, (1 << 64) - 1, 70
    cases = [(ones, delta) for ones in range(4, 40, 3) for delta in np.linspace(-1.0, 1.0, 41)]
    bits = [mask ^ 1 << 63 - ones for ones, _ in cases]
    keys = np.array([(unmixed(one) - (token + 1) * GAMMA) & mask for one in bits], np.uint64)
    logits = torch.full((len(cases), vocab), -80.0)
    logits[:, 5] = 0.0
    logits[:, token] = torch.tensor([-((ones + 1) * np.log(2) + delta) for ones, delta in cases])
    rows = len(cases)
    ones, none = torch.ones(rows, dtype=torch.float64), torch.zeros(rows, dtype=torch.float64)
    shape = RowParams(ones, torch.full((rows,), vocab), ones, none)
    natively = shape_rows(logits, shape, sampler)
    slowly = shape_rows(logits, shape, None)
    drawn = draw(natively, keys)
    assert torch.equal(drawn, best_of_all(slowly, key_tensor(keys)))
    assert set(drawn.tolist()) == {5, token}


def test_one_native_call_knows_positions_of_long_texts():
    if (sampler := native.native_sampler()) is None:
        pytest.skip("the native extension is not built")
    far = np.array([3, 3 + (1 << 16), 3 + (1 << 20)])
    records = np.zeros(len(far), RECORD)
    records["temperature"], records["top_p"], records["top_k"] = 1.0, 1.0, 1003
    records["stem"] = stems(11, 0, Stream.TARGET, 0)
    logits = torch.zeros(len(far), 1003)
    found = torch.from_numpy(native.sample(sampler, logits, records, far)[0])
    ones, none = torch.ones(len(far), dtype=torch.float64), torch.zeros(len(far), dtype=torch.float64)
    shape = RowParams(ones, torch.full((len(far),), 1003), ones, none)
    assert torch.equal(found, draw(shape_rows(logits, shape, None), extend_keys(records["stem"], far)))


def test_what_nobody_asks_for_is_not_drawn():
    """Behind a guess that is not the target's; where guesses are not known yet, nothing can be left out."""
    if native.native_sampler() is None:
        pytest.skip("the native extension is not built")
    rng = np.random.default_rng(22)
    judged, _ = batch_of([random_case(rng) for _ in range(300)], rng)
    everywhere = draw_rows(replace(judged, wants_draws=True), judged.logits).tolist()[0]
    drawn, status = draw_rows(judged, judged.logits).tolist()
    trees = judged.trees
    hit = [
        parent < 0 or token == everywhere[parent]
        for token, parent in zip(trees.token_list, trees.parent_list, strict=True)
    ]
    wanted = trees.reached(np.array(hit)).tolist()
    assert 50 < sum(wanted) < len(wanted) - 50
    assert max(trees.depths[wanted]) >= 2
    assert drawn == [token if is_wanted else -1 for token, is_wanted in zip(everywhere, wanted, strict=True)]
    assert not any(status)
    unknown = replace(judged, trees=replace(trees, token_list=[-1] * len(wanted)))
    assert draw_rows(unknown, judged.logits).tolist()[0] == everywhere


def test_rows_of_guesses_come_behind_what_they_follow():
    if (sampler := native.native_sampler()) is None:
        pytest.skip("the native extension is not built")
    judged, _ = batch_of([random_case(np.random.default_rng(2)) for _ in range(3)], np.random.default_rng(2))
    rows = len(judged.logits)
    for parents in (np.arange(rows), np.zeros(rows, np.int64), np.full(rows - 1, -1)):
        guesses = (parents.tolist(), [0] * rows)
        with pytest.raises(ValueError, match="draft token"):
            native.sample(sampler, judged.logits, judged.row_records, judged.positions, guesses)


def test_a_row_is_the_same_in_any_company(backend: str):
    vocab, rows = 1003, 40
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 3
    rng = np.random.default_rng(2)
    params = [
        SamplingParams(temperature=float(rng.uniform(0.3, 2)), top_p=float(rng.uniform(0.5, 1)), seed=i)
        for i in range(rows)
    ]
    samplers = [sampler(p, vocab) for p in params]

    def shaped(order: Sequence[int], padding: int) -> list[tuple[float, int]]:
        padded = torch.nn.functional.pad(logits[list(order)], (0, padding), value=99.0)
        judged = judgement(padded, [PLAIN] * len(order), [samplers[i] for i in order])
        found = distributions(judged)
        return list(zip(found.floor.tolist(), judge(judged).target_tokens, strict=True))

    together = shaped(range(rows), 0)
    for _ in range(10):
        order = rng.permutation(rows)[: rng.integers(1, rows)]
        assert shaped(order, int(rng.integers(0, 9))) == [together[i] for i in order]


def test_padding_behind_the_vocabulary_never_comes_out(backend: str):
    vocab = 40
    logits = torch.randn(200, vocab + 24)
    logits[:, vocab:] = 50.0
    for temperature in (0.0, 1.0):
        params = [SamplingParams(temperature=temperature, seed=i) for i in range(200)]
        judged = judgement(logits, [PLAIN] * 200, [sampler(p, vocab) for p in params])
        assert judged.logits.shape == (200, vocab)
        own = judge(judged).target_tokens
        assert all(0 <= token < vocab for token in own)


def test_logits_that_do_not_fit_the_rows_are_an_error():
    with pytest.raises(ValueError, match="rows"):
        judgement(torch.zeros(3, 10), [PLAIN], [sampler(SamplingParams(), 10)])
    with pytest.raises(ValueError, match="rows"):
        judgement(torch.zeros(1, 9), [PLAIN], [sampler(SamplingParams(), 10)])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_row_fails_its_own_request_alone(backend: str, poison: float):
    params = SamplingParams(temperature=0.0)
    logits = torch.full((4, 10), -1.0)
    logits[:, 3] = 5.0
    logits[1, 7] = poison
    verdicts = judge(judgement(logits, [PLAIN] * 4, [sampler(params, 10)] * 4))
    assert verdicts.statuses == [RowStatus.OK, RowStatus.NOT_FINITE, RowStatus.OK, RowStatus.OK]
    assert verdicts.target_tokens == [3, -1, 3, 3]
    assert "NaN" in (verdicts.error(1) or "")


@pytest.mark.parametrize("poison", [float("nan"), -float("inf")])
def test_a_poisoned_branch_that_is_not_taken_fails_nothing(backend: str, poison: float):
    logits = torch.full((4, 10), -1.0)
    logits[:, 3] = 5.0
    logits[1] = poison  # after node 0, token 4, which is not what the target says
    draft = Draft((4, 3, 3), (-1, -1, 1))
    verdicts = judge(judgement(logits, [draft], [sampler(SamplingParams(temperature=0), 10)]))
    assert verdicts.paths[0] == [1, 2]
    assert verdicts.error(0) is None
    logits[3] = poison  # after node 2, which is taken
    verdicts = judge(judgement(logits, [draft], [sampler(SamplingParams(temperature=0), 10)]))
    assert verdicts.error(0) is not None


def test_a_grammar_mask_is_kept(backend: str):
    logits = torch.randn(300, 12)
    mask = torch.rand(300, 12) < 0.3
    mask[:, 5] = True
    mask[7] = False
    params = [SamplingParams(seed=i) for i in range(300)]
    samplers = [sampler(p, 12) for p in params]
    for one, row in zip(samplers, mask, strict=True):
        one.grammar = MaskedRows(row[None])
    verdicts = judge(judgement(logits, [PLAIN] * 300, samplers))
    good = np.arange(300) != 7
    assert mask[torch.from_numpy(good)][torch.arange(299), np.array(verdicts.target_tokens)[good]].all()
    assert verdicts.statuses[7] == RowStatus.ALL_MASKED


def test_greedy_takes_the_first_of_equal_logits(backend: str):
    logits = torch.zeros(1, 30)
    logits[0, [7, 9, 20]] = 2.0
    assert judge(judgement(logits, [PLAIN], [sampler(SamplingParams(temperature=0), 30)])).target_tokens == [
        7
    ]


def test_bad_words_count_the_draft_path(backend: str):
    logits = torch.zeros(6, 10)
    limits = {"bad_words": ((1, 2, 3), (5,), (2, 4))}
    draft = Draft((2, 3, 2, 4, 9), (-1, 0, 0, 2, -1))
    judged = judgement(logits, [draft], [sampler(SamplingParams(), 10, prompt=[8, 1], **limits)])
    banned = [set(np.flatnonzero(row == 0).tolist()) for row in dense_probabilities(judged)]
    assert banned == [{5}, {5, 3, 4}, {5}, {5, 4}, {5}, {5}]


def test_minimum_length_counts_the_draft_path(backend: str):
    params = SamplingParams(min_tokens=3, stop_token_ids=(6,))
    request = sampler(params, 10, end_ids=(2,))
    request.commit([4])
    judged = judgement(torch.zeros(4, 10), [Draft.chain([4, 4, 4], 2)], [request])
    banned = [set(np.flatnonzero(row == 0).tolist()) for row in dense_probabilities(judged)]
    assert banned == [{2, 6}, {2, 6}, set(), set()]


def test_penalties_count_the_draft_path(backend: str):
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    judged = judgement(torch.zeros(4, 6), [Draft((3, 3, 4), (-1, 0, -1))], [sampler(params, 6)])
    odds = np.log(dense_probabilities(judged)) - np.log(dense_probabilities(judged)[:, :1])
    assert odds[:, 3] == pytest.approx([0, -0.75, -1.25, 0], abs=1e-6)
    assert odds[:, 4] == pytest.approx([0, 0, 0, -0.75], abs=1e-6)


def test_transformers_agrees_where_it_means_the_same():
    transformers = pytest.importorskip("transformers")
    from transformers.generation import logits_process as hf

    del transformers
    vocab, prompt, generated = 50, [3, 4, 5, 4], [7, 8]
    history = torch.tensor([[*prompt, *generated]])
    params = SamplingParams(
        temperature=0.8,
        top_k=20,
        top_p=0.85,
        min_p=0.02,
        repetition_penalty=1.3,
        min_tokens=4,
        logit_bias={9: 1.5, 10: -2.0},
    )
    words = ((8, 11), (12,), (4, 7, 13))
    processors = [
        hf.SequenceBiasLogitsProcessor([[[9], 1.5], [[10], -2.0]]),
        hf.RepetitionPenaltyLogitsProcessor(1.3),
        hf.NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=2),
        hf.MinNewTokensLengthLogitsProcessor(len(prompt), 4, 2, device="cpu"),
        hf.TemperatureLogitsWarper(0.8),
        hf.TopKLogitsWarper(20),
        hf.TopPLogitsWarper(0.85),
        hf.MinPLogitsWarper(0.02),
    ]
    for seed in range(50):
        logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed)) * 3
        request = sampler(params, vocab, prompt, end_ids=(2,), bad_words=words)
        request.commit(generated)
        ours = dense_probabilities(judgement(logits, [PLAIN], [request]))[0]
        scores = logits.clone()
        for processor in processors:
            scores = processor(history, scores)
        assert ours == pytest.approx(scores.softmax(-1)[0].double().numpy(), abs=1e-6)
