"""Decodes every prompt plainly and with every drafter, one answer at a time, interleaved."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median_low

from foreword.acceptance.params import SamplingParams
from foreword.bench.drafters.decode import DecodeRun, Record, decode
from foreword.bench.methods import MethodBench
from foreword.bench.prompts import BenchPrompt
from foreword.bench.skeleton import PLAIN, check_least, take_turns
from foreword.progress import StageProgress


@dataclass(frozen=True)
class BenchSettings:
    """Settings that all drafters and prompts share."""

    max_tokens: int = 64  # per answer
    temperature: float = 0.0  # 0 is greedy
    seed: int = 0  # of every answer
    repeats: int = 1  # answers per drafter and prompt; the median time counts
    history: bool = False  # whether drafters may learn from earlier answers
    ignore_eos: bool = False  # continue to `max_tokens` after an end token

    def __post_init__(self) -> None:
        check_least(2, max_tokens=self.max_tokens)
        check_least(1, repeats=self.repeats)

    def sampling(self) -> SamplingParams:
        names = ("max_tokens", "temperature", "seed", "ignore_eos")
        return SamplingParams(**{name: getattr(self, name) for name in names})

    def tenant(self, prompt: BenchPrompt, repeat: int) -> str:
        """Return the tenant of a request. Drafters learn from answers of the same tenant only."""
        return f"repeat {repeat}" if self.history else f"repeat {repeat} of {prompt.key}"


class DrafterBench(MethodBench[BenchSettings]):
    """A model and the methods compared on it, one answer at a time."""

    def measure(
        self, prompts: Sequence[BenchPrompt], known: Sequence[Record], progress: StageProgress
    ) -> Iterator[Record]:
        """Yield one record per drafter and prompt that `known` does not have, prompt by prompt."""
        known_keys = {(record.drafter, record.prompt) for record in known}
        drafters = [label for label in self._speculation if label != PLAIN]
        is_warm = False
        for index, prompt in enumerate(prompts):
            missing = [label for label in drafters if (label, prompt.key) not in known_keys]
            if not missing:
                continue
            if not is_warm:
                self._warm_up(prompt)
                is_warm = True

            def run(label: str, repeat: int, prompt: BenchPrompt = prompt, index: int = index) -> DecodeRun:
                stage = f"{label}, {prompt.category}, prompt {index + 1} of {len(prompts)}"
                progress(stage, index, len(prompts))
                return self._run(label, prompt, repeat)

            arms = {label: partial(run, label) for label in (PLAIN, *missing)}
            samples = take_turns(arms, self._settings.repeats, warm_up=0)
            runs = {label: median_run(of_arm) for label, of_arm in samples.items()}
            for label in missing:
                yield Record(label, prompt.key, prompt.category, runs[label], runs[PLAIN])

    def _run(self, label: str, prompt: BenchPrompt, repeat: int) -> DecodeRun:
        ids = self._llm.encode(prompt.text)
        # A tenant per drafter: drafters observe prefill, so the prefix cache must not have pages computed without them.
        tenant = f"{self._name}: {label}, {self._settings.tenant(prompt, repeat)}"
        setting = self._speculation[label]
        return decode(self._llm.engine, ids, self._settings.sampling(), tenant=tenant, speculation=setting)

    def _warm_up(self, prompt: BenchPrompt) -> None:
        """Decode a few tokens with every method, so that one-time work is not measured."""
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        ids = self._llm.encode(prompt.text)
        for label, setting in self._speculation.items():
            tenant = f"{self._name}: {label}, warm-up"
            decode(self._llm.engine, ids, params, tenant=tenant, speculation=setting)


def median_run(runs: Sequence[DecodeRun]) -> DecodeRun:
    """Return the run with the median time, the lower of two."""
    middle = median_low(run.seconds for run in runs)
    return next(run for run in runs if run.seconds == middle)
