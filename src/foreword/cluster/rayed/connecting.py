"""Reaching a Ray, or starting one."""

import ipaddress
import logging
import math
import os
from collections.abc import Sequence
from typing import Any

from foreword.cluster.pools.file import RaySettings
from foreword.cluster.rayed.member import AUTH_VARIABLE
from foreword.errors import RequestError


def import_ray() -> Any:  # noqa: ANN401 - an extra
    """Ray, which takes a second to import."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise RequestError(
            f"ray: in the cluster file needs one more package ({error.name}): pip install 'foreword[cluster]'"
        ) from None
    return ray


def connect(ray: Any, settings: RaySettings, cpus: float) -> bool:  # noqa: ANN401 - an extra
    """Whether it was there before."""
    check_mode(settings.address, os.environ.get(AUTH_VARIABLE, ""))
    shared: dict[str, Any] = {
        "namespace": settings.namespace,
        "logging_level": logging.WARNING,
        "log_to_driver": False,
    }
    try:
        if settings.address:
            ray.init(address=settings.address, **shared)
        else:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            room = max(math.ceil(cpus), os.cpu_count() or 1)
            ray.init(num_cpus=room, include_dashboard=False, **shared)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        reason = " ".join(str(error).split())[:300]
        raise RequestError(
            f"Ray cannot be reached at {settings.address or 'this machine'}: {reason}"
        ) from None
    return bool(settings.address)


def check_mode(address: str, mode: str) -> None:
    """Refuse a Ray that asks for no token: one that is started here can be reached from other machines, too."""
    if not address and mode.lower() not in ("", "token"):
        raise RequestError(
            f"{AUTH_VARIABLE}={mode}: whoever reaches a Ray without token runs code on this machine; leave it out"
        )
    if address and not _is_here(address) and mode.lower() != "token":
        raise RequestError(
            f"ray.address {address} is not this machine, and whoever reaches a Ray without token runs code on it: "
            f"start Ray with {AUTH_VARIABLE}=token, and set {AUTH_VARIABLE}=token here"
        )


def check_guarded(machines: int, guarded: Sequence[bool]) -> None:
    """What was said of this Ray by those who run on its machines."""
    if machines > 1 and not (guarded and all(guarded)):
        raise RequestError(
            f"this Ray has {machines} machines and asks for no token: whoever reaches it runs code on them; "
            f"start it with {AUTH_VARIABLE}=token"
        )


def _is_here(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
