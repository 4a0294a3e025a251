"""What guessing costs, next to the passes that it is meant to save."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from foreword.acceptance.params import SamplingParams
from foreword.bench.drafters.methods import Method, request_config
from foreword.bench.drafters.prompts import own_prompts
from foreword.control.fixed import FixedPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.engine.core import EngineCore
from foreword.engine.llm import LLM
from foreword.engine.messages import NewRequest
from foreword.engine.parts import EngineParts
from foreword.errors import RequestError
from foreword.progress import Progress
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Ask, Drafter, DraftRequest
from foreword.speculation.measured.situation import Situation
from foreword.speculation.report import StageSeconds
from foreword.speculation.requests import DraftPlan, PassEntry

VERIFY_ROWS = (1, 6)
"""Rows of the passes that drafting is compared with: plain decoding, and a verify of five guesses."""


@dataclass(frozen=True)
class Overhead:
    """Median cost of one draft at one length of context."""

    drafter: str
    context: int
    first_ms: float  # the first draft, which reads the whole text; once per request
    draft_ms: float  # every later one
    verify_ms: Mapping[int, float]  # rows of a target pass -> its milliseconds

    def share(self, rows: int) -> float:
        """Drafting as a part of a pass over this many rows."""
        return self.draft_ms / self.verify_ms[rows]


class WildGuesses:
    """Always as many guesses as it is asked for, to get passes of a known size."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """The same token over and over."""
        return [Draft.chain([0] * ask.max_nodes, len(ask.request.tokens), ask.request.epoch) for ask in asks]

    def forget(self, request: DraftRequest) -> None:
        """Nothing is kept."""


class TurnPolicy(FixedPolicy):
    """Lets the drafters of one request take turns, step by step."""

    def __init__(self, turns: Mapping[str, tuple[Drafter, int]]) -> None:
        super().__init__()
        self._turns = turns  # name -> (drafter, number of guesses)
        self.turn: str | None = None  # who drafts for the next step; None: nobody
        self.max_nodes = max(nodes for _, nodes in turns.values())

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> list[DraftPlan | None]:
        """Everything to the one whose turn it is."""
        if self.turn is None:
            return [None] * len(entries)
        drafter, nodes = self._turns[self.turn]
        return [DraftPlan(self.turn, drafter, nodes, nodes)] * len(entries)

    def drafters(self) -> list[Drafter]:
        return [drafter for drafter, _ in self._turns.values()]


def measure_overhead(
    llm: LLM,
    methods: Sequence[Method],
    contexts: Sequence[int],
    repeats: int,
    on_progress: Callable[[str, int, int], None],
) -> list[Overhead]:
    """Decode after every context; passes of known size and the drafters take turns within one answer."""
    if repeats < 1:
        raise RequestError(f"repeats must be at least 1, not {repeats}")
    wild: dict[str, tuple[Drafter, int]] = {_rows(rows): (WildGuesses(), rows - 1) for rows in VERIFY_ROWS}
    with TemporaryDirectory(prefix="foreword-heads-") as folder:  # files of random heads are read once
        configs = {
            method.label: SpeculationConfig.parse(request_config(method, llm, Path(folder)))
            for method in methods
        }
        turns = wild | {
            label: (llm.build_drafter(config), config.num_speculative_tokens)
            for label, config in configs.items()
        }
    policy = TurnPolicy(turns)
    engine = EngineCore(llm.engine.target, llm.loaded.vocabulary(), EngineParts(policy=policy))
    tokens = (repeats + 1) * len(turns) * (policy.max_nodes + 1) + 1  # if every guess were accepted
    if not contexts or min(contexts) < 1 or max(contexts) + tokens > engine.max_model_len:
        raise RequestError(f"contexts must be in 1 .. {engine.max_model_len - tokens} for this model")
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    text = _text(llm, max(contexts))
    found = []
    for context in contexts:
        (request,) = engine.add(NewRequest("overhead", tuple(text[:context]), params))
        policy.turn = None
        while not request.output_ids:
            on_progress(f"reading {context} tokens", request.kv.computed, context)
            engine.step()
        steps = _take_turns(
            engine,
            policy,
            list(turns),
            repeats,
            partial(on_progress, f"drafting behind {context} tokens"),
        )
        engine.abort(request.name)
        found += [_overhead(label, context, steps) for label in configs]
    return found


def _take_turns(
    engine: EngineCore, policy: TurnPolicy, turns: Sequence[str], repeats: int, on_progress: Progress
) -> dict[str, list[StageSeconds]]:
    """Where the time of every turn's steps went; each one's first is apart from `repeats` others."""
    steps: dict[str, list[StageSeconds]] = {turn: [] for turn in turns}
    for done in range(repeats + 1):
        on_progress(done, repeats + 1)
        for turn in turns:
            policy.turn = turn
            before = engine.seconds
            engine.step()
            steps[turn].append(engine.seconds - before)
    return steps


def _overhead(label: str, context: int, steps: Mapping[str, Sequence[StageSeconds]]) -> Overhead:
    first, *later = (1e3 * step.draft for step in steps[label])
    passes = {rows: [1e3 * step.verify for step in steps[_rows(rows)][1:]] for rows in VERIFY_ROWS}
    return Overhead(label, context, first, median(later), {rows: median(ms) for rows, ms in passes.items()})


def _rows(rows: int) -> str:
    return f"a pass over {rows}"


def _text(llm: LLM, length: int) -> list[int]:
    """Our own prompts over and over, a few tokens further in every round: much matches, not all of it."""
    tokens = [token for prompt in own_prompts() for token in llm.encode(prompt.text)]
    rounds = (tokens[start:] + tokens[:start] for start in cycle(range(0, len(tokens), 97)))
    return list(islice((token for one in rounds for token in one), length))
