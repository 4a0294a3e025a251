"""Watches the policy file, and creates the configurations of its drafters."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from foreword.control.policy_file.document import CohortRule, PolicyFile
from foreword.drafters.config import REQUEST_KEYS, SpeculationConfig, SpeculationSetting, parse_setting
from foreword.drafters.names import method_names
from foreword.errors import RequestError

WATCH_SECONDS = 1.0  # seconds between two checks of the file


class WatchedFile:
    """Detects changes of a file by time stamp and size, at most once every `WATCH_SECONDS`."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self.path = path
        self._clock = clock
        self._checked_at = clock()
        self._seen = self._signature()

    def has_changed(self) -> bool:
        """Return whether the file has changed since the last call; a deleted file has not."""
        now = self._clock()
        if now - self._checked_at < WATCH_SECONDS:
            return False
        self._checked_at = now
        signature = self._signature()
        has_changed, self._seen = signature != self._seen, signature
        return has_changed and signature is not None

    def _signature(self) -> tuple[int, int, int] | None:
        """Return time stamp, size and inode of the file; None if it cannot be read."""
        try:
            stat = self.path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


Configs = Mapping[str, SpeculationConfig]
"""Configurations of the policy file's drafters, by name."""


def drafter_configs(policy: PolicyFile) -> dict[str, SpeculationConfig]:
    """Return the drafters' configurations by name; raise `RequestError` for invalid ones."""
    configs = {}
    for name, rule in policy.drafters.items():
        try:
            configs[name] = SpeculationConfig.parse(rule.config)
        except RequestError as error:
            raise RequestError(f"speculation policy: drafters.{name}: {error}") from None
    names = {*policy.drafters, *method_names()}
    for name in policy.overload.stop if policy.overload is not None else ():
        if name not in names:
            raise RequestError(f"speculation policy: overload.stop: there is no drafter {name!r}")
    return configs


def setting_within(
    setting: SpeculationSetting,
    default: SpeculationConfig | None,
    policy: PolicyFile,
    rule: CohortRule,
    configs: Configs,
) -> SpeculationSetting:
    """Return the request's setting without drafters on nodes that must not receive its cohort's texts.

    Return False, for no drafter, if none is left.
    """
    config = parse_setting(setting, default)
    if config is None:
        return setting
    methods = policy.permitted_methods(rule, config.method, lambda name: configs[name].method)
    if len(methods) == len(config.method):
        return setting
    if not methods:
        return False
    sizes = {key: value for key, value in config.as_mapping().items() if key in REQUEST_KEYS}
    return SpeculationConfig.parse(sizes | {"method": methods}, config).as_mapping()


def config_for(policy: PolicyFile, rule: CohortRule, name: str, configs: Configs) -> SpeculationConfig:
    """Return a drafter's configuration with the depth limit of a cohort."""
    config, depth = configs[name], policy.depth(rule)
    if depth is None:
        return config
    if "num_speculative_tokens" not in policy.drafters[name].config:
        config = replace(config, num_speculative_tokens=depth)
    return replace(config, max_depth=min(depth, config.max_depth or depth))
