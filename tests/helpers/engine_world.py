"""A small world around an engine: random users, impatient and rude, on a target that is easily broken."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foreword.acceptance.params import SamplingParams
from foreword.control.fixed import FixedPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.engine.config import EngineConfig, EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.messages import NewRequest
from foreword.engine.requests.request import Request
from foreword.engine.text import Vocabulary
from foreword.kv.paged_cache import PAGE_SIZE
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftRequest, DraftTask
from foreword.speculation.measured.situation import Situation
from foreword.speculation.requests import DraftPlan, PassEntry
from helpers.checked_target import CheckedTarget, Definition, PlainAnswer
from helpers.clocks import ScriptedClock
from helpers.pending_drafts import left_pending
from helpers.pretend_store import PRETEND_ROWS
from helpers.saboteur import PlantedError, Saboteur, nonsense
from helpers.scripted_drafters import RandomTreeDrafter
from helpers.window_drafters import WINDOW_METHODS, WindowDrafter, window_drafter

VOCAB = 13
END_IDS = frozenset({3})
SPECULATIONS: tuple[Any, ...] = (
    None,
    False,
    {"method": "ngram", "num_speculative_tokens": 5},
    {"method": "suffix", "num_speculative_tokens": 9, "max_depth": 4},
    {"method": "layer_skip", "num_speculative_tokens": 24},
    {"num_speculative_tokens": 2},
)
TRUTH = {"ngram": 0.9, "suffix": 0.5, "layer_skip": 0.8}
"""How often each pretend drafter tells the truth."""


@dataclass(frozen=True)
class WorldSizes:
    """How the world is made; drawn at random."""

    pages: int
    max_rows: int
    max_running: int
    prefix_caching: bool
    fault_share: float  # of the steps
    cancel_share: float  # chance per step and place
    preempt_share: float  # chance per step and place
    arrival_share: float  # chance per step
    talkative: bool  # short prompts and long answers: requests outgrow the pages that they were let in with

    @staticmethod
    def draw(rng: random.Random) -> "WorldSizes":
        """Tiny, mostly."""
        talkative = rng.random() < 0.5
        pages, max_rows = (
            rng.choice((6, 7, 9) if talkative else (6, 8, 12, 20, 30)),
            rng.choice((4, 16, 40, 100, 200)),
        )
        often = 0.15 if max_rows > 4 else 0.02  # in small chunks a long text is never computed to its end
        return WorldSizes(
            pages=pages,
            max_rows=max_rows,
            max_running=rng.choice((3, 8) if talkative else (1, 2, 4, 8)),
            prefix_caching=rng.random() < 0.7,
            fault_share=rng.choice((0.0, 0.2, 0.5)),
            cancel_share=rng.choice((0.0, 0.02, 0.08)),
            preempt_share=rng.choice((0.0, 0.02, often)),
            arrival_share=rng.choice((0.1, 0.4, 1.0)),
            talkative=talkative,
        )


class PretendDrafter(RandomTreeDrafter):
    """Random trees for the requests that it is asked about; late and senseless ones among them."""

    def __init__(self, world: "World", truth: float) -> None:
        super().__init__(world.next_token, VOCAB, truth, world.rng.randrange(1 << 30))
        self._world = world
        self._late: dict[int, Draft] = {}  # by request, a draft that was made and not handed in
        self.holds: set[int] = set()  # requests that it was asked about and not told to forget

    def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
        self._world.saboteur.strike("propose")
        self.holds |= {ask.request.request_id for ask in asks}
        drafts = [self._handed_in(ask, draft) for ask, draft in zip(asks, super().propose(asks), strict=True)]
        if self._world.saboteur.is_due("nonsense drafts"):
            self._world.saboteur.note("nonsense drafts")
            return nonsense(self._rng, drafts)
        is_known = all(0 <= token < VOCAB for draft in drafts for token in draft.tokens)
        return [*left_pending(drafts)] if is_known and self._rng.random() < 0.5 else drafts

    def forget(self, request: DraftRequest) -> None:
        self.holds.discard(request.request_id)
        self._late.pop(request.request_id, None)
        self._world.saboteur.strike("forget")

    def _handed_in(self, ask: DraftTask, draft: Draft) -> Draft:
        late = self._late.pop(ask.request.request_id, None)
        dice = self._rng.random()
        if late is not None:
            return late
        if dice < 0.05:
            self._late[ask.request.request_id] = draft
            return Draft()
        if dice < 0.07:
            return Draft.chain([VOCAB + 5], len(ask.request.tokens), ask.request.epoch)
        if dice < 0.09:
            return Draft.chain([1] * 60, len(ask.request.tokens), ask.request.epoch)
        return draft


class SabotagedPolicy(FixedPolicy):
    """What was asked for, unless the saboteur is at it."""

    def __init__(self, world: "World") -> None:
        super().__init__()
        self._world = world

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> list[DraftPlan | None]:
        self._world.saboteur.strike("plan")
        plan = super().plan(entries, situation)
        if self._world.saboteur.is_due("nonsense plan"):
            self._world.saboteur.note("nonsense plan")
            return self._world.rng.choice([plan[1:], plan[::-1], [*plan, *plan], []])
        return plan


@dataclass
class Told:
    """What the engine has said about one answer."""

    request: Request
    expected: PlainAnswer
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    from_draft: int = 0
    finish_reason: str | None = None


class World:
    """An engine, its users' settings, and what they were promised."""

    def __init__(self, seed: int, speculations: Sequence[Any] = SPECULATIONS) -> None:
        self.rng = random.Random(seed)
        self._speculations = speculations
        self.sizes = WorldSizes.draw(self.rng)
        self.saboteur = Saboteur(self.rng, self.sizes.fault_share)
        self.target = CheckedTarget(self.saboteur, VOCAB)
        self.drafters: list[PretendDrafter] = []
        self.windows: list[WindowDrafter] = []
        self.core = self._core()
        self._definition = Definition(self.target, END_IDS, self.core.max_model_len)
        self._promised: dict[int, tuple[int, ...]] = {}  # by request, prompt and answer
        self._beginnings = [self._tokens(self.rng.randint(16, 50)) for _ in range(2)]
        self.told: dict[tuple[str, int], Told] = {}
        self.is_open = True  # whether users may still come
        self.overlapping = 0  # steps that were launched while another was under way
        self.followed = 0  # steps that were launched before their requests' tokens were known
        self.forced = 0  # preemptions that the engine did not decide on
        self.prompt_scores: dict[str, list[float]] = {}  # by name, where asked for

    def _core(self) -> EngineCore:
        sizes = self.sizes
        config = EngineConfig(
            kv_cache_memory_bytes=sizes.pages * PAGE_SIZE * PRETEND_ROWS.bytes_per_row,
            max_num_batched_tokens=sizes.max_rows,
            max_num_seqs=max(sizes.max_running, sizes.pages // 6 + 1),
            enable_prefix_caching=sizes.prefix_caching,
            max_draft_share=self.rng.choice((0.5, 1e9, 1e9)),
        )
        default = SpeculationConfig.parse({"method": "ngram", "num_speculative_tokens": 4})
        parts = EngineParts(config, SabotagedPolicy(self), self._build, default, clock=self._moody_clock())
        return EngineCore(self.target, Vocabulary(VOCAB, END_IDS), parts)  # type: ignore[arg-type]

    def _moody_clock(self) -> Callable[[], float]:
        """Whatever is measured takes no time, or much: chunks and drafts are cut as on a machine with moods."""
        clock, rng = ScriptedClock(), random.Random(self.rng.random())

        def read() -> float:
            clock.pass_by(rng.choice((0.0, 0.0, 1e-3, 0.02, 0.2)))
            return clock()

        return read

    def _build(self, config: SpeculationConfig) -> Drafter:
        if config.method[0] in WINDOW_METHODS:
            self.windows.append(window_drafter(config))
            return self.windows[-1]
        self.drafters.append(PretendDrafter(self, TRUTH[config.method[0]]))
        return self.drafters[-1]

    def next_token(self, history: Sequence[int], request: DraftRequest) -> int:
        """What a drafter that knows the truth says."""
        promised = self._promised[request.request_id]
        if tuple(history) == promised[: len(history)] and len(history) < len(promised):
            return promised[len(history)]
        return self.rng.randrange(VOCAB)

    def arrive(self, name: str) -> None:
        """A user asks."""
        rng = self.rng
        longest = 16 if self.sizes.talkative else 60
        prompt = self._tokens(rng.randint(1, longest))
        if rng.random() < 0.6:
            prompt = (rng.choice(self._beginnings) + prompt)[: rng.randint(1, longest)]
        params = self._params()
        if rng.random() < 0.2:
            params = replace(params, min_tokens=rng.randint(0, params.max_tokens))
        new = NewRequest(name, tuple(prompt), params, rng.choice("ab"), rng.choice(self._speculations))
        for request in self.core.add(new):
            expected = self._definition.answer(prompt, params, request.identity.index)
            self._promised[request.request_id] = (*prompt, *expected.tokens)
            self.told[name, request.identity.index] = Told(request, expected)
        if params.prompt_logprobs is not None:
            self.prompt_scores[name] = self._definition.prompt_logprobs(prompt)

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def _params(self) -> SamplingParams:
        rng = self.rng
        options: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 0.7, "top_k": 5},
            {"temperature": 1.2, "top_p": 0.9, "presence_penalty": 0.7},
            {"frequency_penalty": 0.5, "repetition_penalty": 1.3},
            {"min_p": 0.05, "logit_bias": {4: 2.0}, "stop_token_ids": (4, 7)},
            {"allowed_token_ids": tuple(range(0, VOCAB, 2))},
        ]
        return SamplingParams(
            **rng.choice(options),
            seed=rng.randrange(1 << 40),
            max_tokens=rng.choice((1, rng.randint(2, 36), 60 if self.sizes.talkative else 20)),
            ignore_eos=rng.random() < (0.9 if self.sizes.talkative else 0.6),
            n=rng.choice((1, 1, 1, 2, 3)),
            logprobs=rng.choice((None, None, 0, 2)),
            prompt_logprobs=rng.choice((None, None, None, 1)),
        )

    def cancel(self) -> None:
        """Some user goes away."""
        names = [name for (name, _), told in self.told.items() if told.finish_reason is None]
        self.hear(self.core.abort(self.rng.choice([*names, "nobody"])))

    def preempt(self) -> None:
        """Some request has to make way."""
        if running := self.core.scheduler.running:
            self.core.scheduler.preempt(self.rng.choice(running))
            self.forced += 1

    def hear(self, deltas: Sequence[Any]) -> int:
        """Take down what the engine says; returns how many answers it gave up."""
        lost = 0
        for delta in deltas:
            told = self.told[delta.request_id, delta.index]
            assert told.finish_reason is None, "an answer goes on behind its end"
            is_first = not told.tokens
            told.tokens += delta.token_ids
            told.logprobs += [entry.logprob for entry in delta.logprobs]
            told.prompt_logprobs += [entry.logprob for entry in delta.prompt_logprobs]
            assert is_first or not delta.prompt_logprobs, "the prompt's scores come with the first delta"
            assert 0 <= delta.from_draft <= len(delta.token_ids)
            told.from_draft += delta.from_draft
            told.finish_reason = delta.finish_reason
            assert (delta.stats is None) == (delta.finish_reason is None)
            if delta.finish_reason == "error":
                assert PlantedError.__name__ in delta.error, delta.error
                lost += 1
            if delta.stats is not None:
                check_stats(told, delta.stats)
        return lost


def check_stats(told: Told, stats: Any) -> None:
    """The books of an answer that has ended."""
    assert stats.output_tokens == len(told.tokens)
    assert stats.prompt_tokens == told.request.prompt_len
    assert 0 <= stats.cached_tokens < max(stats.prompt_tokens, 1)
    assert 0 <= stats.accepted <= stats.drafted
    assert stats.rollback_tokens >= stats.drafted - stats.accepted  # and what lay beyond the end
    assert stats.rejected_kv_bytes == stats.rollback_tokens * PRETEND_ROWS.bytes_per_row
    assert len(stats.drafted_per_position) == len(stats.accepted_per_position)
    assert sum(stats.accepted_per_position) == stats.accepted
    assert max(stats.drafted_per_position, default=0) == stats.drafts <= stats.passes
    assert list(stats.drafted_per_position) == sorted(stats.drafted_per_position, reverse=True)
    assert list(stats.accepted_per_position) == sorted(stats.accepted_per_position, reverse=True)
    pairs = zip(stats.accepted_per_position, stats.drafted_per_position, strict=True)
    assert all(0 <= accepted <= drafted for accepted, drafted in pairs)
    assert stats.preemptions >= 0
    seconds = [value for name, value in vars(stats).items() if name.endswith("_seconds")]
    assert all(value >= 0 for value in seconds)
    if told.finish_reason != "error":  # a verdict that could not be committed was judged all the same
        assert stats.accepted == told.from_draft
