"""Settings of `foreword serve --learn`, and the constants of training and roll-outs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ALL_TENANTS = "*"
FACTORY = "foreword.learn.factory:load_engine"  # creates an engine that learns


@dataclass(frozen=True)
class LearnSettings:
    """What is learned from, when, and how versions are rolled out."""

    directory: str  # of versions and state
    share: float = 0.03  # fraction of busy time that a training may use on the engine's device
    tokens: int = 2_000_000  # maximum kept tokens
    hours: float = 24.0  # maximum age of a kept text
    min_tokens: int = 20_000  # new answer tokens that begin a training
    device: str = ""  # of the training; empty: the engine's
    tenants: tuple[str, ...] = (ALL_TENANTS,)  # whose texts are kept; "*": all
    keeps_texts: bool = False  # store texts in the directory, and read them at the next start

    # Texts. Shorter answers have few positions to learn from. Longer texts need larger batches.
    min_answer_tokens: int = 16
    text_tokens: int = 4096  # maximum length of a text
    held_out_permille: int = 100  # of the prompts; measured before and after a training

    # Trainings
    tune_passes: float = 3.0  # passes over the texts with a head to begin from; more would overfit
    first_passes: float = 10.0  # without one
    wanted_steps: int = 100  # the batch size is chosen for about so many steps: warm-up takes up to 50
    min_steps: int = 8
    batch_tokens: tuple[int, int] = (2048, 16384)  # least and most tokens of a step
    muon: float = 0.005  # a quarter of the rate of a new head, so that the head keeps what it has learned
    adam: float = 2.5e-4
    first_muon: float = 0.02  # defaults of `foreword train eagle3`
    first_adam: float = 1e-3
    least_gain: float = 1.01  # minimum ratio of tokens per pass after and before; less may be chance
    least_first_tau: float = 1.2  # minimum tokens per pass of a first head; less costs more than it gains
    nice: int = 19  # lowest priority: also other programs of the machine come first
    first_pause: float = 60.0  # seconds after a failed training; doubles with each failure
    longest_pause: float = 3600.0

    # Pauses of a training on the engine's device
    resume_after: float = 0.2  # seconds that the engine must be idle: requests often follow each other
    slice_seconds: float = 0.1  # length of a turn beside requests: longer ones delay tokens visibly
    tick_seconds: float = 1.0  # between two checks of trainings and roll-outs

    # Roll-outs are shorter than those of a policy file: a server with little traffic should finish within minutes.
    steps: tuple[float, ...] = (25, 100)  # percent of requests
    min_requests: int = 20
    min_passes: int = 1000
    verify_samples: int = 20
    min_levels: int = 500
    spare_heads: int = 2  # heads loaded beside the first one: the version in use and the next
    reload_pause: float = 5.0  # seconds until a policy file that the engine has not adopted is written again
    reload_attempts: int = 6  # then its newest version is given up
    kept_versions: int = 5

    @staticmethod
    def of(given: Mapping[str, Any]) -> "LearnSettings":
        """Return the settings of a `Start` message."""
        tenants = tuple(given.get("tenants", (ALL_TENANTS,)))
        return LearnSettings(**{**given, "tenants": tenants})

    @property
    def home(self) -> Path:
        return Path(self.directory)

    @property
    def policy_path(self) -> Path:
        return policy_path(self.home)

    def takes_part(self, tenant: str) -> bool:
        return ALL_TENANTS in self.tenants or tenant in self.tenants


def policy_path(directory: Path) -> Path:
    """Return the path of the policy file that the learner writes."""
    return directory / "policy.json"
