"""Applies the policy file: chooses a request's cohort and drafters, and moves roll-outs between stages."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from time import time

from foreword.control.policy import MeasuredPolicy
from foreword.control.policy_file.document import OTHER, CohortRule, PolicyFile, Stage
from foreword.control.policy_file.matching import RequestTraits
from foreword.control.policy_file.parsing import read_policy
from foreword.control.reporting.totals import SpeculationTotals
from foreword.control.rollout.evidence import Outcome
from foreword.control.rollout.pair import Gate, Switch
from foreword.control.rollout.rollouts import Rollouts
from foreword.engine.background import BackgroundWork
from foreword.engine.drafting.drafter_pool import DrafterPool
from foreword.engine.drafting.known_answers import AnswerHints
from foreword.engine.messages import NewRequest
from foreword.engine.policy.file import Configs, WatchedFile, config_for, drafter_configs, setting_within
from foreword.engine.policy.health import Baselines, forecast
from foreword.engine.requests.request import Assignment, RolloutArm
from foreword.errors import EngineStopped, ForewordError, RequestError
from foreword.speculation.drafting import Drafter, all_faults
from foreword.speculation.requests import DraftPlan

_log = logging.getLogger(__name__)

EVALUATION_STEPS = 8  # steps between two evaluations of roll-outs


@dataclass
class PolicyFileController:
    """The policy file and its roll-outs. `assign` is thread-safe; the engine's thread calls all other methods."""

    path: Path
    policy: MeasuredPolicy
    clock: Callable[[], float]  # seconds
    # Model, device and version; states of roll-outs that another environment saved are not restored.
    environment: Mapping[str, str] = field(default_factory=dict)
    model: str = ""  # name of the model that rules match
    is_shape_invariant: bool = True  # texts do not depend on the number of tokens in a pass
    wall_clock: Callable[[], float] = time  # seconds since 1970
    background: BackgroundWork = field(default_factory=BackgroundWork)
    rollouts: Rollouts = field(init=False)
    document: PolicyFile = field(init=False)
    _pool: DrafterPool = field(init=False)

    def __post_init__(self) -> None:
        self.document = read_policy(self.path)
        self.configs: Configs = drafter_configs(self.document)
        self._file = WatchedFile(self.path, self.clock)
        self._lock = Lock()
        self._adopting = Lock()  # held while a changed file comes into use
        self._reads = 0  # how often a changed file was read
        self._labels: set[str] = set()  # cohort labels in use
        self._overload_switches: dict[str, Switch] = {}  # by drafter; closed under overload
        self._baselines = Baselines()
        self._steps = 0
        self.policy.use(self.document.settings)
        state_file = self.document.state_file
        state = None if state_file is None else self.path.parent / state_file
        self.rollouts = Rollouts(self.environment, state, self.wall_clock)
        self.rollouts.apply_rules(self.document.rollouts)

    def attach(self, pool: DrafterPool) -> None:
        """Set the pool that creates the file's drafters."""
        self._pool = pool
        pool.keep(self.configs.values())

    def assign(self, new: NewRequest) -> Assignment:
        """Return a request's cohort, drafters and service class, by the newest version of the file."""
        self._reload_if_changed()
        traits = self.traits(new)
        while True:
            with self._lock:
                document, configs = self.document, self.configs
            try:
                assigned = self._assign(new, traits, document, configs)
            except RequestError:
                if document is self.document:
                    raise
                continue  # the file has changed meanwhile, which released a drafter of the old one
            return replace(assigned, service=document.service.of(traits))

    def _assign(
        self, new: NewRequest, traits: RequestTraits, document: PolicyFile, configs: Configs
    ) -> Assignment:
        """Return the assignment without the service class."""
        rule = document.cohort(traits)
        label = self._label(document.label(rule, traits))
        limit = document.step_limit(traits)
        if not document.is_on(rule) or new.speculation is False:
            return Assignment(label, None, limit)
        hints = AnswerHints.of(new)
        if new.speculation is not None and new.speculation is not True:
            setting = setting_within(new.speculation, self._pool.default_config, document, rule, configs)
            plan = self._pool.resolve(setting, hints)
            return Assignment(label, _with_depth_limit(plan, document.depth(rule)), limit)
        gates, arms = self._gates(rule, new, configs)
        if rule.drafters is None and not gates:
            plan = self._pool.resolve(new.speculation, hints)
            return Assignment(label, _with_depth_limit(plan, document.depth(rule)), limit, arms)
        if hints.prediction:  # drafters are then called in order, so leave out those that may not draft
            gates = {name: gate for name, gate in gates.items() if gate.is_open}
        choices = {name: config_for(document, rule, name, configs) for name in gates}
        default = self._pool.default_config
        if rule.drafters is None and default is not None:  # drafters being rolled out join the default one
            choices = {"+".join(default.method): default, **choices}
        plan = replace(self._pool.choice_of(choices), gates=gates) if choices else None
        # The file itself may list the grammar drafter, so the grammar hint adds none.
        prediction_hint = AnswerHints(hints.prediction)
        return Assignment(label, self._pool.with_hints(plan, new.speculation, prediction_hint), limit, arms)

    def traits(self, new: NewRequest) -> RequestTraits:
        """Return the properties of a request that the file's rules match."""
        labels = new.labels
        return RequestTraits(
            tenant=new.tenant,
            model=labels.model or self.model,
            adapter=new.adapter or labels.adapter,
            temperature=new.params.temperature,
            prompt_tokens=len(new.prompt_token_ids),
            json_schema=labels.json_schema or new.params.structured is not None,
            stream=labels.stream,
            priority=labels.priority,
            metadata=labels.metadata,
        )

    def _gates(
        self, rule: CohortRule, new: NewRequest, configs: Configs
    ) -> tuple[dict[str, Gate], tuple[RolloutArm, ...]]:
        """Return the gates of all drafters that the request could use, in file order, and its roll-out arms."""
        gates, arms = {}, []
        with self._lock:
            pairs = self.rollouts.pairs
            in_rollout = [name for name, cohort in pairs if cohort == rule.name and name in configs]
            for name in dict.fromkeys((*(rule.drafters or ()), *in_rollout)):  # each name once
                pair = pairs.get((name, rule.name))
                if pair is None:  # A drafter without roll-out is paused only under overload.
                    gates[name] = Gate(self._overload_switches.setdefault(name, Switch()))
                    continue
                gate = pair.gate(new.tenant, new.request_id)
                if pair.stage is Stage.CANARY:
                    arms.append(RolloutArm(name, rule.name, gate is not None and gate.is_live))
                if gate is not None:
                    gates[name] = gate
        return gates, tuple(arms)

    def fixed_plan(self, drafter: str, cohort: str) -> DraftPlan:
        """Return a plan with which this drafter drafts in every step, up to the cohort's depth."""
        cohorts = {rule.name: rule for rule in self.document.cohorts}
        rule = cohorts.get(cohort, CohortRule(OTHER))
        config = config_for(self.document, rule, drafter, self.configs)
        return replace(self._pool.choice_of({drafter: config}), is_fixed=True)

    def _label(self, label: str) -> str:
        """Return the label and remember it, or OTHER beyond the limit: users must not create unlimited cohorts."""
        if label not in self._labels:
            if len(self._labels) >= self.document.max_cohorts - 1:
                return OTHER
            self._labels.add(label)
        return label

    def between_steps(self, waiting: int, kv_usage: float, totals: SpeculationTotals) -> None:
        """Reload a changed file, update overload gates, and evaluate roll-outs.

        `waiting` requests are queued, and `kv_usage` is the fraction of the KV pages in use.
        """
        self._reload_if_changed()
        self._apply_overload(waiting, kv_usage)
        self._steps += 1
        if self._steps % EVALUATION_STEPS == 0:
            self.evaluate(totals)

    def evaluate(self, totals: SpeculationTotals) -> None:
        """Move every roll-out whose evidence requires it to another stage, and save the roll-outs."""
        with self._lock:
            pairs = dict(self.rollouts.pairs)
        has_moved = False
        for (drafter, cohort), pair in pairs.items():
            health = self._baselines.health(pair, self._drafters_of(drafter), self.policy, totals)
            if pair.evaluate(health, forecast(drafter, cohort, self.policy)):
                has_moved = True
                _log.info("%s for %s: %s (%s)", drafter, cohort, pair.stage, pair.reason)
        self.rollouts.save(is_due=has_moved)

    def ended(self, arm: RolloutArm, outcome: Outcome) -> None:
        """Add a request's outcome to its arm of a roll-out."""
        pair = self.rollouts.pairs.get((arm.drafter, arm.cohort))
        if pair is not None:
            pair.add_outcome(outcome, arm.is_canary)

    def methods(self, drafter: str) -> tuple[str, ...]:
        """Return the methods of a drafter; a name that is not in the file is itself a method."""
        config = self.configs.get(drafter)
        return (drafter,) if config is None else config.method

    def faults(self, drafter: str) -> int | None:
        """Return the faults of this drafter alone; None if it is not in the file."""
        return all_faults(self._drafters_of(drafter)).total() if drafter in self.configs else None

    def _drafters_of(self, drafter: str) -> list[Drafter]:
        """Return the pool's drafter with this name in the file, as a list; empty if there is none."""
        config = self.configs.get(drafter)
        return [] if config is None else self._pool.created_by(config)

    def _apply_overload(self, waiting: int, kv_usage: float) -> None:
        """Pause the drafters that the file stops under overload, or resume them."""
        rule = self.document.overload
        if rule is None:
            return
        is_overloaded = waiting >= rule.queue and kv_usage >= rule.kv_usage
        for name in self.configs:
            if name in rule.stop or set(self.methods(name)) & set(rule.stop):
                self._overload_switches.setdefault(name, Switch()).is_paused = is_overloaded
        for (name, _), pair in list(self.rollouts.pairs.items()):
            switch = self._overload_switches.get(name)
            pair.switch.is_paused = switch is not None and switch.is_paused

    def set_stage(self, drafter: str, cohort: str, stage: str) -> None:
        """Move a roll-out on the operator's request; raise `RequestError` for unknown drafters, cohorts or stages."""
        names = [OTHER, *(rule.name for rule in self.document.cohorts)]
        if drafter not in self.configs or cohort not in names:
            raise RequestError(
                f"speculation policy: there is no pair of {drafter!r} and {cohort!r} in the file"
            )
        if stage not in ("next", *Stage):
            raise RequestError(f"speculation policy: state must be next, {', '.join(Stage)}, not {stage!r}")
        with self._lock:
            self.rollouts.set_stage(drafter, cohort, stage)

    def _reload_if_changed(self) -> None:
        """Read the file again if it has changed, in a thread if drafters must be loaded; keep the old one on errors."""
        if not self._file.has_changed():
            return
        try:
            document = read_policy(self.path)
            configs = drafter_configs(document)
        except ForewordError as error:
            _log.warning("%s has changed and is not used, the old one stays: %s", self.path, error)
            return
        with self._lock:
            self._reads += 1
            read = self._reads
        if not self._is_ready(configs) or not self._adopt(document, configs, read):
            self.background.start(lambda: self._prepare(document, configs, read), "foreword-policy")

    def _is_ready(self, configs: Configs) -> bool:
        return all(self._pool.is_ready(config.as_mapping()) for config in configs.values())

    def _prepare(self, document: PolicyFile, configs: Configs, read: int) -> None:
        """Create the drafters of a changed file, then use it; runs in a thread, since a model may be loaded.

        Return without effect if the file has changed again.
        """
        try:
            is_adopted = False
            while not is_adopted and read == self._reads:
                for config in configs.values():
                    self._pool.create_early(config)
                is_adopted = self._adopt(document, configs, read)
        except EngineStopped:  # The engine was closed meanwhile.
            return
        except ForewordError as error:
            _log.warning("%s has changed and is not used, the old one stays: %s", self.path, error)
            return

    def _adopt(self, document: PolicyFile, configs: Configs, read: int) -> bool:
        """Use a changed file from now on.

        Return False, without effect, if it has changed again, or if one of its drafters was released meanwhile.
        """
        with self._adopting:
            # Requests use drafters of the old file until the new one is in use.
            self._pool.keep([*self.configs.values(), *configs.values()])
            if read != self._reads or not self._is_ready(configs):
                return False
            with self._lock:
                self.configs = configs
                self.document = document
                self.policy.use(document.settings)
                self.rollouts.apply_rules(document.rollouts)
            self._pool.keep(configs.values())
        _log.info("%s has changed and is used from now on", self.path)
        return True

    def close(self) -> None:
        """Stop loading drafters, and save the roll-outs."""
        self.background.close()
        self.rollouts.save()


def _with_depth_limit(plan: DraftPlan | None, depth: int | None) -> DraftPlan | None:
    if plan is None or depth is None or plan.max_depth <= depth:
        return plan
    return replace(plan, max_depth=depth)
