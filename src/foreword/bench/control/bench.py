"""The controller benchmark on one engine."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from foreword.bench.control.changes import (
    Brake,
    Circumstances,
    busy_core,
    conditions,
    measure_conditions,
    measure_mixed,
    slowed,
)
from foreword.bench.control.report import ControlBenchReport
from foreword.bench.control.timeline import EngineLine
from foreword.bench.control.windows import (
    CONTROLLER,
    MIXED,
    PLAIN_ARM,
    ControlArm,
    EngineStation,
    Prompts,
    measure_cells,
    summarise,
)
from foreword.bench.methods import Method
from foreword.bench.prompts import BenchPrompt
from foreword.control.policy import MeasuredPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.registry import drafter_kinds
from foreword.engine.config import EngineConfig, EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.loader import LoadedModel
from foreword.engine.profiles import start_with_profile
from foreword.engine.prompts import encode_prompt
from foreword.errors import RequestError
from foreword.progress import StageProgress
from foreword.speculation.drafting import Drafter

SLOWER = 10.0


@dataclass(frozen=True)
class ControlSizes:
    """Size of the benchmark."""

    kinds: Sequence[str]  # empty: all, and mixed
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32)
    windows: int = 12
    tokens: int = 48  # mean tokens per request and window
    phase_seconds: float = 15.0  # per change; 0: no changes
    learning_seconds: float = 5.0  # of the controller per cell before it is measured
    mixed_batch: int = 8
    most_kinds: int = 100  # limit of categories that were not named

    @staticmethod
    def of(
        quick: bool,
        kinds: Sequence[str] = (),
        batches: Sequence[int] | None = None,
        windows: int | None = None,
        changes: bool = True,
    ) -> "ControlSizes":
        """Return the full size, or with `quick` one for 15 minutes on a small machine; None: default."""
        usual = QUICK if quick else ControlSizes(())
        return replace(
            usual,
            kinds=kinds,
            batches=batches or usual.batches,
            windows=usual.windows if windows is None else windows,
            phase_seconds=usual.phase_seconds if changes else 0.0,
        )

    def check(self, known: Set[str]) -> None:
        """Raise `RequestError` for categories without prompts."""
        for kind in self.kinds:
            if kind not in {*known, MIXED}:
                raise RequestError(f"--kinds: {kind!r} is none of {', '.join(sorted(known))}, {MIXED}")

    def chosen(self, known: Sequence[str]) -> list[str]:
        """Return the categories to measure."""
        return list(self.kinds) or [*known[: self.most_kinds - 1], MIXED]


QUICK = ControlSizes((), windows=6, tokens=24, phase_seconds=7.0, learning_seconds=3.0, most_kinds=3)


def measure_control(
    loaded: LoadedModel,
    prompts: Sequence[BenchPrompt],
    fixed: Sequence[Method],
    sizes: ControlSizes,
    on_progress: StageProgress,
) -> ControlBenchReport:
    """Compare the default policy with plain decoding and with settings that draft at every step."""
    brake, policy = Brake(), MeasuredPolicy()
    settings = {one.label: _at_every_step(one) for one in fixed}
    own = ControlArm(CONTROLLER, None)
    arms = [PLAIN_ARM, own, *(ControlArm(label, setting) for label, setting in settings.items())]
    parsed = [SpeculationConfig.parse(setting) for setting in settings.values()]
    engine = _engine(loaded, policy, brake, parsed, sizes)
    known = _encoded(loaded, prompts)
    kinds = sizes.chosen([kind for kind in known.kinds if kind != MIXED])
    try:
        # If a drafter remembers answers, every window needs a tenant of its own.
        methods = [name for one in (_default(loaded), *parsed) for name in one.method]
        learns = any(drafter_kinds()[name].traits.learns_answers for name in methods)
        station = EngineStation(engine, known, sizes.tokens, are_strangers=learns)
        line = EngineLine(engine, known)
        cells = [(kind, batch) for batch in sizes.batches for kind in kinds]
        rates = measure_cells(station, cells, arms, sizes.windows, on_progress, sizes.learning_seconds)
        if not sizes.phase_seconds:
            return ControlBenchReport(summarise(rates), probe_share=policy.explorer.share)
        can = Circumstances(partial(brake.pulled, SLOWER), busy_core)
        changes = conditions(kinds[-1], kinds[0], max(sizes.batches), sizes.phase_seconds, can)
        reactions = measure_conditions(line, changes, own, on_progress)
        on_progress("mixed traffic", 0, 1)
        mixed = measure_mixed(line, own, sizes.mixed_batch, 3 * sizes.phase_seconds)
        return ControlBenchReport(summarise(rates), reactions, mixed, policy.explorer.share)
    finally:
        engine.close()


def default_fixed(loaded: LoadedModel) -> list[Method]:
    """Return the first default drafter at several depths, and a lookup."""
    config = _default(loaded)
    first = config.method[0]
    alone = SpeculationConfig.parse({"method": first}, config).as_mapping()
    return [
        *(Method(f"{first} {depth}", {**alone, "num_speculative_tokens": depth}) for depth in (1, 2, 4)),
        Method("ngram 4", {"method": "ngram", "num_speculative_tokens": 4}),
    ]


def _default(loaded: LoadedModel) -> SpeculationConfig:
    choice = loaded.choose_speculation("auto")
    if choice.config is None:
        raise RequestError(f"there is nothing to control: {choice.reason}")
    return choice.config


def _at_every_step(method: Method) -> Mapping[str, Any]:
    if method.config is None:
        raise RequestError("--fixed: the default is always measured; name other drafters")
    return {**method.config, "fixed": True}


def _engine(
    loaded: LoadedModel,
    policy: MeasuredPolicy,
    brake: Brake,
    offered: Sequence[SpeculationConfig],
    sizes: ControlSizes,
) -> EngineCore:
    def build(config: SpeculationConfig) -> Drafter:
        return slowed(loaded.build_drafter(config), brake)

    config = EngineConfig(max_num_seqs=max(*sizes.batches, sizes.mixed_batch))
    parts = EngineParts(config, policy, build, _default(loaded), offered=offered)
    engine = EngineCore(loaded.decoder, loaded.vocabulary(), parts)
    start_with_profile(engine)
    return engine


def _encoded(loaded: LoadedModel, prompts: Sequence[BenchPrompt]) -> Prompts:
    by_kind: dict[str, list[list[int]]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt.category, []).append(encode_prompt(loaded.tokenizer, prompt.text))
    return Prompts(by_kind)
