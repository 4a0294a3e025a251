"""The drafters of a policy file, as the engine makes them."""

from collections.abc import Mapping
from dataclasses import replace

from foreword.control.policy_file.document import CohortRule, PolicyFile
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.names import method_names
from foreword.drafters.overrides import REQUEST_KEYS, SpeculationSetting, parse_setting
from foreword.errors import RequestError

REMOTE = "remote"
"""The drafter that sends texts to other machines."""

Configs = Mapping[str, SpeculationConfig]


def drafter_configs(policy: PolicyFile) -> dict[str, SpeculationConfig]:
    """By name; raises for what no drafter can be made from."""
    configs = {}
    for name, rule in policy.drafters.items():
        try:
            configs[name] = SpeculationConfig.parse(rule.config)
        except RequestError as error:
            raise RequestError(f"speculation policy: drafters.{name}: {error}") from None
    known = {*policy.drafters, *method_names()}
    for stopped in policy.overload.stop if policy.overload is not None else ():
        if stopped not in known:
            raise RequestError(f"speculation policy: overload.stop: there is no drafter {stopped!r}")
    return configs


def wish_within(
    wish: SpeculationSetting,
    default: SpeculationConfig | None,
    policy: PolicyFile,
    rule: CohortRule,
    configs: Configs,
) -> SpeculationSetting:
    """What a request asks for, without draft nodes if its cohort names drafters and none of them asks nodes.

    The texts of such a cohort stay where they are: whoever asks may choose among drafters, not take that back.
    """
    config = parse_setting(wish, default)
    if rule.drafters is None or config is None or REMOTE not in config.method:
        return wish
    named = {*rule.drafters, *(one.drafter for one in policy.rollouts if one.cohort == rule.name)}
    if any(REMOTE in configs[name].method for name in named):
        return wish
    rest = [method for method in config.method if method != REMOTE]
    if not rest:
        return False
    sizes = {key: value for key, value in config.as_mapping().items() if key in REQUEST_KEYS}
    return SpeculationConfig.parse(sizes | {"method": rest}, config).as_mapping()


def config_for(policy: PolicyFile, rule: CohortRule, name: str, configs: Configs) -> SpeculationConfig:
    """The drafter's configuration for a cohort, which may bound how deep it guesses."""
    config, depth = configs[name], policy.depth(rule)
    if depth is None:
        return config
    if "num_speculative_tokens" not in policy.drafters[name].config:
        config = replace(config, num_speculative_tokens=depth)
    return replace(config, max_depth=min(depth, config.max_depth or depth))
