"""Options of `foreword serve` for training the head on the served texts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreword.cli.options.common import split_list
from foreword.cli.options.grouped import flag, given, option
from foreword.cli.options.model import check_device_of
from foreword.errors import RequestError
from foreword.paths import user_path

if TYPE_CHECKING:
    from foreword.engine.drafting.default_speculation import SpeculationChoice
    from foreword.models.formats.checkpoint import Checkpoint


@dataclass(frozen=True)
class LearnOptions:
    """Whether and how the head adapts to the traffic."""

    learn: bool = flag(
        "Train the EAGLE-3 head on the served texts, mostly in idle time. Texts stay the same."
    )
    learn_dir: Path | None = option(
        None, "Directory of trained versions. Default: one per model in the cache directory."
    )
    learn_share: float = option(
        0.03, "Share of busy time that training may use on the engine's device.", min=0, max=1
    )
    learn_tokens: int = option(2_000_000, "Most tokens of texts that are kept for training.", min=1000)
    learn_hours: float = option(24.0, "Hours after which a kept text is dropped.", min=0.01)
    learn_min_tokens: int = option(20_000, "New answer tokens that begin a training.", min=1)
    learn_device: str | None = option(None, "Device of the training, such as cuda:1. Default: the engine's.")
    learn_tenants: str | None = option(
        None,
        "Tenants whose texts are kept, as `foreword policy tenant` prints, separated by commas; *: all. "
        "Required with API keys.",
    )
    learn_keep_texts: bool = flag("Also store the kept texts in --learn-dir, for the next start.")

    def __post_init__(self) -> None:
        if self.learn_device is not None:
            check_device_of("--learn-device", self.learn_device)
        if not self.learn and (changed := given(self, *asdict(self))):
            raise RequestError(f"{changed[0]} needs --learn")
        if self.learn_min_tokens > self.learn_tokens:
            raise RequestError(
                f"--learn-min-tokens {self.learn_min_tokens} is more than --learn-tokens {self.learn_tokens} keeps"
            )

    def check(self, policy: Path | None, speculation: str, processes: int, has_keys: bool) -> None:
        """Raise `RequestError` if the server's other options exclude `--learn`."""
        if not self.learn:
            return
        if policy is not None:
            raise RequestError("--learn writes the policy file itself; leave out --speculation-policy")
        if speculation == "off":
            raise RequestError("--learn trains a drafter; leave out --speculation off")
        if processes > 1:
            raise RequestError("--learn does not support a --tensor-parallel-size above 1")
        _check_tenants(split_list(self.learn_tenants), has_keys)

    def settings(self, checkpoint: "Checkpoint", choice: "SpeculationChoice") -> dict[str, Any]:
        """Return the fields of `LearnSettings` given by these options; empty without `--learn`.

        Raise `RequestError` if the model's speculation excludes learning.
        """
        if not self.learn:
            return {}
        from foreword.models.sources.builtin import cache_directory
        from foreword.train.files import identity_of

        if choice.config is None:
            raise RequestError(f"--learn needs speculative decoding: {choice.reason}")
        if choice.config.fixed:
            raise RequestError("--learn needs a drafter whose depth the policy chooses; leave out fixed")
        directory = self.learn_dir or cache_directory() / "learn" / identity_of(checkpoint)
        values = {
            name.removeprefix("learn_"): value
            for name, value in asdict(self).items()
            if name not in ("learn", "learn_dir", "learn_keep_texts", "learn_device", "learn_tenants")
        }
        return values | {
            "directory": str(user_path(directory).resolve()),
            "device": self.learn_device or "",
            "tenants": list(split_list(self.learn_tenants)) or ["*"],
            "keeps_texts": self.learn_keep_texts,
        }


def _check_tenants(tenants: Sequence[str], has_keys: bool) -> None:
    """Raise `RequestError` for tenants that no request can have: without it, no text would be kept."""
    from foreword.server.settings import is_tenant

    if has_keys and not tenants:
        raise RequestError(
            "with API keys, --learn needs --learn-tenants: the tenants whose texts may be used, or *"
        )
    named = [tenant for tenant in tenants if tenant != "*"]
    if named and not has_keys:
        raise RequestError("--learn-tenants: a server without API keys has one tenant; leave the option out")
    for tenant in named:
        if not is_tenant(tenant):
            raise RequestError(
                f"--learn-tenants: a tenant is 32 digits from `foreword policy tenant`, or *, not {tenant!r}"
            )
