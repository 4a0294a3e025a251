"""What things take, in seconds: measured (`calibration.py`) or made up."""

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a target's pass by its rows: straight lines between what is known, and on beyond the last."""

    points: tuple[tuple[int, float], ...]  # by rows, rising

    @staticmethod
    def straight(first: float, per_row: float) -> "PassTimes":
        """A pass over one row, and what every further one adds."""
        return PassTimes(((1, first), (2, first + per_row)))

    @property
    def most_measured(self) -> int:
        """Rows beyond which times are drawn on from the last two."""
        return self.points[-1][0]

    def seconds(self, rows: int) -> float:
        points = self.points
        if len(points) == 1:
            return points[0][1]
        place = min(max(bisect_left(points, (rows, 0.0)), 1), len(points) - 1)
        (low, early), (high, late) = points[place - 1], points[place]
        found = early + (late - early) * (rows - low) / (high - low)
        return max(found, late) if rows > high else found


@dataclass(frozen=True)
class LevelTimes:
    """Drafting on one device."""

    level: float  # one level for one request
    per_request: float = 0.0  # more, for each further request of the same round
    first: float = 0.0  # before the first level of a draft

    def seconds(self, requests: int) -> float:
        """One level for so many requests."""
        return self.level + self.per_request * (requests - 1)

    def scaled(self, level: float) -> "LevelTimes":
        """With a level that takes as long as this, and further requests in proportion."""
        per_request = self.per_request * level / self.level if self.level else 0.0
        return LevelTimes(level, per_request, self.first)


@dataclass(frozen=True)
class Costs:
    """All of them."""

    passes: PassTimes
    local: LevelTimes  # drafting on the target's own device
    node: LevelTimes  # drafting on a draft node
    host: float = 0.0  # of a step, beside its pass and its draft
    guessing_host: float = 0.0  # more of a step in which something is guessed
    per_row: float = 0.0  # of a step, for every row that is judged
    remote: float = 0.0  # work of the target's own thread for its draft nodes, per step
    remote_per_request: float = 0.0
    prompt: float = 0.0  # a token of a prompt, at the target
    node_prompt: float = 0.0  # and at a draft node

    def step(self, requests: int, guesses: int, prompt_tokens: int = 0) -> float:
        """A step without its draft."""
        rows = requests + guesses
        seconds = self.passes.seconds(rows) + self.host + self.per_row * rows + self.prompt * prompt_tokens
        return seconds + self.guessing_host if guesses else seconds

    def telling(self, requests: int) -> float:
        """The target's work for its nodes in a step."""
        return self.remote + self.remote_per_request * (requests - 1)


ILLUSTRATIVE = Costs(
    passes=PassTimes.straight(15e-3, 15e-3 / 400),
    local=LevelTimes(0.8e-3, 0.8e-3 / 200),
    node=LevelTimes(0.8e-3, 0.8e-3 / 200),
    remote=0.1e-3,
    remote_per_request=0.2e-3 / 15,
    prompt=0.05e-3,
    node_prompt=0.005e-3,
)
"""A large target and a draft model about twenty times as fast. Nobody has measured them: they are of the right size."""
