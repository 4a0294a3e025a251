"""A cluster whose members Ray places, starts and supervises."""

import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import mkdtemp
from time import monotonic
from typing import Any

from foreword.cluster.address import is_loopback
from foreword.cluster.pools.file import ClusterConfig, RaySettings
from foreword.cluster.pools.fleet import MemberLog, MemberStatus, resize
from foreword.cluster.pools.running import (
    CHECK_SECONDS,
    NODE,
    ROUTER,
    TARGET,
    Member,
    Pools,
    Process,
    Stopping,
    launch,
    write_lists,
)
from foreword.errors import RequestError

SILENT_SECONDS = 10.0  # seconds without a message after which a member counts as gone


class MemberRegistry:
    """Registry that members update periodically, so that a restarted registry soon knows all."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._reports: dict[str, tuple[dict[str, Any], float]] = {}  # by name: report and its time

    def report(self, reported: dict[str, Any]) -> list[dict[str, Any]]:
        """Register a member; return all members."""
        self._reports[reported["name"]] = reported, self._clock()
        return self.members()

    def leave(self, name: str) -> None:
        """Remove a member that is leaving."""
        self._reports.pop(name, None)

    def members(self) -> list[dict[str, Any]]:
        now = self._clock()
        return [reported for reported, at in self._reports.values() if now - at <= SILENT_SECONDS]


_log = logging.getLogger(__name__)

Report = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Reports a member to the registry and returns all members."""

AUTH_VARIABLE = "RAY_AUTH_MODE"


class MemberActor:
    """Restarts the member's process when it ends, like the supervisor on one machine.

    Ray restarts the actor when it or its machine ends; the process ends with it. A single thread does everything,
    because the process is tied to it.
    """

    def __init__(
        self,
        member: Member,
        machine: str,
        report: Report,
        start: Callable[[Member, Path], Process] = launch,
        has_run: bool = False,
    ) -> None:
        """`has_run`: an earlier actor ran it, whose process may still be ending."""
        self._member = member.on(machine)
        self._machine = machine
        self._report = report
        self._lists = Path(mkdtemp(prefix="foreword-"))
        write_lists(self._lists, [])
        self._pools = Pools([member], lambda one: start(one, self._lists), have_run=has_run)
        self._thread = threading.Thread(target=self._pools.run, args=(self.report_status,), name=member.name)

    def run(self) -> None:
        self._thread.start()

    def report_status(self) -> None:
        """Report to the registry, and write the lists."""
        with suppress(Exception):  # the registry is restarting
            listed = [(one["name"], one["kind"], one["address"]) for one in self._report(self.reported())]
            write_lists(self._lists, listed, self._member.chosen_nodes)

    def reported(self) -> dict[str, Any]:
        member = self._member
        restarts, is_refused = self._pools.restarts().get(member.name, 0), bool(self._pools.refused())
        reported = MemberStatus(member.name, member.kind, member.address, restarts, self._machine, is_refused)
        return asdict(reported)

    def is_guarded(self) -> bool:
        """Return whether Ray requires a token here."""
        return os.environ.get(AUTH_VARIABLE, "").lower() == "token"

    def stop(self) -> None:
        """End the process and wait for it."""
        self._pools.stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        for path in self._lists.iterdir():
            path.unlink()
        self._lists.rmdir()


MAX_REPLY_SECONDS = 4 * CHECK_SECONDS  # timeout of the registry in seconds


def import_ray() -> Any:  # noqa: ANN401 - an extra
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise RequestError(
            f"ray: in the cluster file needs one more package ({error.name}): pip install 'foreword[cluster]'"
        ) from None
    return ray


def connect(ray: Any, settings: RaySettings, cpus: float) -> bool:  # noqa: ANN401 - an extra
    """Connect to Ray or start it; return whether it was running."""
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
    """Refuse a Ray without authentication, which other machines could reach."""
    if not address and mode.lower() not in ("", "token"):
        raise RequestError(
            f"{AUTH_VARIABLE}={mode}: anyone who reaches a Ray without token runs code on this machine; leave it out"
        )
    if address and not is_loopback(address.rpartition(":")[0].strip("[]")) and mode.lower() != "token":
        raise RequestError(
            f"ray.address {address} is not this machine, and anyone who reaches a Ray without token runs code on it: "
            f"start Ray with {AUTH_VARIABLE}=token, and set {AUTH_VARIABLE}=token here"
        )


def check_guarded(machines: int, guarded: Sequence[bool]) -> None:
    """Refuse a Ray with several machines and no authentication, as reported by its actors."""
    if machines > 1 and not (guarded and all(guarded)):
        raise RequestError(
            f"this Ray has {machines} machines and asks for no token: anyone who reaches it runs code on them; "
            f"start it with {AUTH_VARIABLE}=token"
        )


_log = logging.getLogger(__name__)

REGISTRY = "registry"
PLACED_SECONDS = 60.0  # seconds that members may wait for placement before a warning


class RayFleet:
    """Implements `foreword cluster up` with `ray`. Actors outlive it on a Ray that was running before."""

    def __init__(self, cluster: ClusterConfig) -> None:
        assert cluster.ray is not None
        self._cluster = cluster
        self._ray = import_ray()
        address = cluster.ray.address
        _log.info("%s ...", f"connecting to Ray at {address}" if address else "starting Ray on this machine")
        is_shared = connect(self._ray, cluster.ray, cluster.room)
        self._lifetime = "detached" if is_shared else None
        self._namespace = cluster.ray.namespace
        self._actors: dict[str, Any] = {}
        self._member_log = MemberLog()
        self.stopped = Stopping()
        self._registry = self._started(MemberRegistry, REGISTRY, num_cpus=0)

    def up(self) -> None:
        """Start missing members; raise `RequestError` if Ray spans machines without authentication."""
        _log.info("Ray is there; starting the registry ...")
        self._ray.get(self._registry.members.remote())  # wait until it runs
        self.find()
        placed = self._place()
        for member in self._cluster.members:
            self._add(member, placed.get(member.name))
        self._check_token()
        scale = self._cluster.scale
        if scale is not None:
            resize(self, self._cluster.member(scale.node), scale.least)

    def find(self) -> None:
        """Find the actors of an earlier `up`."""
        for one in self._ray.util.list_named_actors():
            if one != REGISTRY:
                self._actors[one] = self._ray.get_actor(one, self._namespace)

    def run(self, and_then: Callable[[], None]) -> None:
        try:
            while not self.stopped.wait(CHECK_SECONDS):
                with suppress(self._ray.exceptions.RayError):  # the registry is restarting
                    and_then()
        finally:
            self.down()

    def members(self) -> list[MemberStatus]:
        reported = self._ray.get(self._registry.members.remote(), timeout=MAX_REPLY_SECONDS)
        members = [MemberStatus(**one) for one in reported]
        self._member_log.log_changes(members)
        return members

    def names(self) -> list[str]:
        return list(self._actors)

    def add(self, member: Member) -> None:
        self._add(member, None)

    def drop(self, name: str) -> None:
        """Remove a node; it ends after notifying its targets."""
        self._registry.leave.remote(name)
        actor = self._actors.pop(name, None)
        if actor is not None:
            self._end([actor])

    def down(self) -> None:
        """End routers, then targets, then nodes, so that no node drains for an ended target."""
        kinds = {one.name: one.kind for one in self._cluster.members}
        for kind in (ROUTER, TARGET, NODE):
            self._end([actor for name, actor in self._actors.items() if kinds.get(name, NODE) == kind])
        self._ray.kill(self._registry)
        for target in self._cluster.members:
            with suppress(ValueError):  # it has none
                self._ray.util.remove_placement_group(self._ray.util.get_placement_group(self._group(target)))
        self._ray.shutdown()

    def _end(self, actors: list[Any]) -> None:
        ending = [actor.stop.remote() for actor in actors]
        for actor, ends in zip(actors, ending, strict=True):
            with suppress(self._ray.exceptions.RayError):
                self._ray.get(ends)
            self._ray.kill(actor)

    def _place(self) -> dict[str, Any]:
        """Return the placement of members that belong together, by name."""
        placed: dict[str, Any] = {}
        for target in self._cluster.members:
            pair = [target, *map(self._cluster.member, target.near)]
            if len(pair) == 1 or target.name in self._actors:
                continue
            _log.info("placing %s ...", " beside ".join(one.name for one in pair))
            group = self._ray.util.placement_group(
                [_bundle(one) for one in pair],
                strategy="STRICT_PACK" if target.is_strict else "PACK",
                name=self._group(target),
                lifetime=self._lifetime,
            )
            if not group.wait(PLACED_SECONDS):
                names = " and ".join(one.name for one in pair)
                _log.warning("Ray has no room for %s yet: %s", names, [_bundle(one) for one in pair])
            for place, one in enumerate(pair):
                placed[one.name] = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=place
                )
        return placed

    def _add(self, member: Member, strategy: Any | None) -> None:  # noqa: ANN401 - Ray's
        options = {"num_cpus": member.cpus, "num_gpus": member.gpus}
        if strategy is not None:
            options["scheduling_strategy"] = strategy
        resources = ", ".join(f"{amount:g} {name}" for name, amount in _bundle(member).items())
        _log.info("%s waits for its place (%s)", member.name, resources)
        self._actors[member.name] = self._started(RayMember, member.name, member, self._namespace, **options)

    def _started(self, kind: type, name: str, *arguments: object, **options: Any) -> Any:  # noqa: ANN401 - Ray's
        """Return an actor of this name, new or left by an earlier `up`."""
        options |= {"name": name, "lifetime": self._lifetime, "get_if_exists": True, "max_restarts": -1}
        return self._ray.remote(kind).options(**options).remote(*arguments)

    def _group(self, target: Member) -> str:
        return f"{self._namespace}/{target.name}"

    def _check_token(self) -> None:
        """Refuse a Ray without authentication on several machines."""
        hosts = {one["NodeManagerAddress"] for one in self._ray.nodes() if one["Alive"]}
        replies = [] if len(hosts) == 1 else [actor.is_guarded.remote() for actor in self._actors.values()]
        ready = []
        if replies:
            ready, _ = self._ray.wait(replies, num_returns=len(replies), timeout=PLACED_SECONDS)
        try:
            check_guarded(len(hosts), self._ray.get(ready))
        except RequestError:
            self.down()
            raise


class RayMember(MemberActor):
    """A member in its Ray actor."""

    def __init__(self, member: Member, namespace: str) -> None:
        ray = import_ray()

        def report(reported: dict[str, Any]) -> Any:  # noqa: ANN401 - Ray's
            registry = ray.get_actor(REGISTRY, namespace)
            return ray.get(registry.report.remote(reported), timeout=MAX_REPLY_SECONDS)

        context = ray.get_runtime_context()
        here = context.get_node_id()
        machine = next(one["NodeManagerAddress"] for one in ray.nodes() if one["NodeID"] == here)
        super().__init__(member, machine, report, has_run=context.was_current_actor_reconstructed)
        self.run()


def _bundle(member: Member) -> dict[str, float]:
    """Return the resources that Ray reserves for a member."""
    return {"CPU": member.cpus} | ({"GPU": member.gpus} if member.gpus else {})
