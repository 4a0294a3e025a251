"""The endless batch writes what a plain loop over whole texts writes, whoever shares the batch."""

import torch

from foreword.train.passes.attention import Spans
from foreword.train.passes.plain_target import PlainTarget
from foreword.train.passes.target import wide_logits
from foreword.train.texts.batches import EndlessBatch, Job

CPU = torch.device("cpu")


def _greedy(target: PlainTarget, prompt: list[int], max_new: int, stops: frozenset[int]) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new:
        ids = torch.tensor(tokens)
        states = target.forward(ids, torch.arange(len(tokens)), Spans.of([len(tokens)], CPU)).last
        tokens.append(int(wide_logits(states[-1:], target.weights.head).argmax()))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


def test_rows_that_come_and_go_write_their_own_greedy_texts(target: PlainTarget):
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, 5), (9, 12), (4, 1), (7, 3), (12, 9), (3, 7), (5, 4)]
    prompts = [torch.randint(3, 300, (size,), generator=generator).tolist() for size, _ in sizes]
    stops = frozenset(_greedy(target, prompts[1], 6, frozenset())[4:5])  # ends one of them early
    written: dict[int, list[int]] = {}

    def job(number: int) -> Job:
        return Job(prompts[number], sizes[number][1], 0.0, lambda tokens: written.__setitem__(number, tokens))

    batch = EndlessBatch(target, rows=3, context=24, stop_ids=stops, steps=4, prefill_tokens=16)
    for _ in batch.run(iter([job(number) for number in range(len(sizes))])):
        pass
    assert sorted(written) == list(range(len(sizes)))
    for number, (_, max_new) in enumerate(sizes):
        assert written[number] == _greedy(target, prompts[number], max_new, stops)
    assert len(written[1]) <= 5
    assert batch.tokens_written == sum(map(len, written.values()))


def test_a_temperature_draws_from_the_targets_distribution(target: PlainTarget):
    first: list[int] = []
    jobs = (Job([5, 6, 7], 1, 1.0, lambda tokens: first.append(tokens[0])) for _ in range(4000))
    for _ in EndlessBatch(target, rows=200, context=8, stop_ids=frozenset(), steps=1).run(jobs):
        pass
    states = target.forward(torch.tensor([5, 6, 7]), torch.arange(3), Spans.of([3], CPU)).last
    wanted = wide_logits(states[-1:], target.weights.head).softmax(-1)[0]
    counts = torch.bincount(torch.tensor(first), minlength=len(wanted)) / len(first)
    assert (counts - wanted).abs().sum() / 2 < 0.12  # a sample this large stays within it
