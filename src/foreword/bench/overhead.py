"""Measures the time of a draft relative to target passes at the same context."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from foreword.bench.batch_runs import greedy_requests
from foreword.bench.methods import Method, request_config
from foreword.bench.prompts import own_prompts
from foreword.bench.skeleton import take_turns
from foreword.control.fixed import FixedPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.engine.config import EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.llm import LLM
from foreword.errors import RequestError
from foreword.progress import StageProgress
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftTask
from foreword.speculation.measured.situation import Situation
from foreword.speculation.report import StageSeconds
from foreword.speculation.requests import DraftPlan, PassEntry

VERIFY_ROWS = (1, 6)  # tokens in the reference passes: plain decoding, and verification of five draft tokens


@dataclass(frozen=True)
class Overhead:
    """Time of one drafter's drafts at one context length."""

    drafter: str
    context: int
    first_ms: float  # first draft of a request, which reads the whole text
    draft_ms: float  # later drafts; median
    verify_ms: Mapping[int, float]  # median target pass, by number of tokens in it

    @property
    def shares(self) -> dict[int, float]:
        """Time of a later draft relative to a target pass, by number of tokens in the pass."""
        return {rows: self.draft_ms / ms for rows, ms in self.verify_ms.items()}


class ArbitraryDrafts(Drafter):
    """Drafts as many arbitrary tokens as allowed, for passes with a known number of tokens."""

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        return [
            Draft.chain([0] * task.max_nodes, len(task.request.tokens), task.request.epoch) for task in tasks
        ]


class TurnPolicy(FixedPolicy):
    """A policy whose caller chooses the drafter of the next step."""

    def __init__(self, turns: Mapping[str, tuple[Drafter, int]]) -> None:
        super().__init__()
        self._turns = turns  # name -> (drafter, draft tokens)
        self.turn: str | None = None  # drafter of the next step; None: plain decoding
        self.max_nodes = max(nodes for _, nodes in turns.values())

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> list[DraftPlan | None]:
        if self.turn is None:
            return [None] * len(entries)
        drafter, nodes = self._turns[self.turn]
        return [DraftPlan(self.turn, drafter, nodes, nodes)] * len(entries)

    def drafters(self) -> list[Drafter]:
        return [drafter for drafter, _ in self._turns.values()]


def measure_overhead(
    llm: LLM, methods: Sequence[Method], contexts: Sequence[int], repeats: int, on_progress: StageProgress
) -> list[Overhead]:
    """Measure each method's drafts at each context length.

    One answer is decoded per length. Its steps alternate between the drafters and the reference passes.
    """
    if repeats < 1:
        raise RequestError(f"repeats must be at least 1, not {repeats}")
    reference_passes: dict[str, tuple[Drafter, int]] = {
        _reference_name(rows): (ArbitraryDrafts(), rows - 1) for rows in VERIFY_ROWS
    }
    with TemporaryDirectory(prefix="foreword-heads-") as folder:  # random heads
        configs = {
            method.label: SpeculationConfig.parse(request_config(method, llm, Path(folder)))
            for method in methods
        }
        turns = reference_passes | {
            label: (llm.build_drafter(config), config.num_speculative_tokens)
            for label, config in configs.items()
        }
    policy = TurnPolicy(turns)
    engine = EngineCore(llm.engine.target, llm.loaded.vocabulary(), EngineParts(policy=policy))
    tokens = (repeats + 1) * len(turns) * (policy.max_nodes + 1) + 1  # if every draft token is accepted
    if not contexts or min(contexts) < 1 or max(contexts) + tokens > engine.max_model_len:
        raise RequestError(f"contexts must be in 1 .. {engine.max_model_len - tokens} for this model")
    text = _text(llm, max(contexts))
    rows = []
    for context in contexts:
        (request,) = engine.add(*greedy_requests("overhead", [text[:context]], tokens))
        policy.turn = None
        while not request.output_ids:
            on_progress(f"reading {context} tokens", request.kv.computed, context)
            engine.step()
        arms = {turn: partial(_step, engine, policy, turn) for turn in turns}
        show = partial(on_progress, f"drafting after {context} tokens")
        steps = take_turns(arms, repeats + 1, show, warm_up=0)
        engine.abort(request.name)
        rows += [_overhead(label, context, steps) for label in configs]
    return rows


def _step(engine: EngineCore, policy: TurnPolicy, turn: str, _: int) -> StageSeconds:
    """Run a step with the drafter named `turn`; return the step's times."""
    policy.turn = turn
    before = engine.seconds
    engine.step()
    return engine.seconds - before


def _overhead(label: str, context: int, steps: Mapping[str, Sequence[StageSeconds]]) -> Overhead:
    """Return a drafter's times; `steps` are the times of all steps by drafter, of which the first reads the text."""
    first_ms, *later_ms = (1e3 * step.draft for step in steps[label])
    verify_ms = {
        rows: median(1e3 * step.verify for step in steps[_reference_name(rows)][1:]) for rows in VERIFY_ROWS
    }
    return Overhead(label, context, first_ms, median(later_ms), verify_ms)


def _reference_name(rows: int) -> str:
    return f"a pass over {rows}"


def _text(llm: LLM, length: int) -> list[int]:
    """Return `length` tokens: the shipped prompts again and again, each time rotated by 97 more tokens.

    So lookups find most continuations, but not all.
    """
    tokens = [token for prompt in own_prompts() for token in llm.encode(prompt.text)]
    rotations = (tokens[start:] + tokens[:start] for start in cycle(range(0, len(tokens), 97)))
    return list(islice(chain.from_iterable(rotations), length))
