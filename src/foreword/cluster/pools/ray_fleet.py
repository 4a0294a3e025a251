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
    """Registry of the members. All report periodically, so that a restarted registry soon has all of them."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        # name -> (fields of `MemberStatus`, time of the report)
        self._reports: dict[str, tuple[dict[str, Any], float]] = {}

    def report(self, status: dict[str, Any]) -> list[dict[str, Any]]:
        """Register a member; return all members."""
        self._reports[status["name"]] = status, self._clock()
        return self.members()

    def leave(self, name: str) -> None:
        """Remove a member that is leaving."""
        self._reports.pop(name, None)

    def members(self) -> list[dict[str, Any]]:
        """Return the members that have reported recently."""
        now = self._clock()
        return [status for status, at in self._reports.values() if now - at <= SILENT_SECONDS]


_log = logging.getLogger(__name__)

Report = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Reports a member (the fields of `MemberStatus`) to the registry and returns all members."""

AUTH_VARIABLE = "RAY_AUTH_MODE"  # environment variable of Ray; "token" requires a token


class MemberActor:
    """Runs one member, and restarts its process when it ends, like the supervisor on one machine.

    Ray restarts the actor when the actor or its machine ends; the process ends with the actor. A single thread starts
    and watches the process, because the process ends when the thread that started it ends.
    """

    def __init__(
        self,
        member: Member,
        machine: str,
        report: Report,
        start: Callable[[Member, Path], Process] = launch,
        has_run: bool = False,
    ) -> None:
        """`machine` is this machine's address. `has_run`: an earlier actor has run the member."""
        self._member = member.on(machine)
        self._machine = machine
        self._report = report
        self._lists = Path(mkdtemp(prefix="foreword-"))
        write_lists(self._lists, [])
        self._pools = Pools([member], lambda started: start(started, self._lists), have_run=has_run)
        self._thread = threading.Thread(target=self._pools.run, args=(self.report_status,), name=member.name)

    def run(self) -> None:
        self._thread.start()

    def report_status(self) -> None:
        """Report to the registry, and write the lists of members that it returns."""
        with suppress(Exception):  # the registry may be restarting
            members = self._report(self.status())
            listed = [(other["name"], other["kind"], other["address"]) for other in members]
            write_lists(self._lists, listed, self._member.chosen_nodes)

    def status(self) -> dict[str, Any]:
        """Return the fields of the member's `MemberStatus`."""
        member = self._member
        restarts, refused = self._pools.restarts().get(member.name, 0), self._pools.refused()
        return asdict(
            MemberStatus(member.name, member.kind, member.address, restarts, self._machine, bool(refused))
        )

    def is_guarded(self) -> bool:
        """Return whether Ray requires a token on this machine."""
        return os.environ.get(AUTH_VARIABLE, "").lower() == "token"

    def stop(self) -> None:
        """End the process and wait for it."""
        self._pools.stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        for path in self._lists.iterdir():
            path.unlink()
        self._lists.rmdir()


MAX_REPLY_SECONDS = 4 * CHECK_SECONDS  # maximum seconds to wait for a reply of the registry


def import_ray() -> Any:  # noqa: ANN401 - an extra
    """Return the module `ray`; raise `RequestError` if it is not installed."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise RequestError(
            f"ray: in the cluster file needs one more package ({error.name}): pip install 'foreword[cluster]'"
        ) from None
    return ray


def connect(ray: Any, settings: RaySettings, cpus: float) -> bool:  # noqa: ANN401 - an extra
    """Connect to the Ray of the settings and return True; without one, start it with at least `cpus` CPUs."""
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
    """Raise `RequestError` for a Ray without authentication that other machines could reach."""
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
    """Raise `RequestError` for a Ray with several machines unless all actors have reported that it requires a token.

    `guarded` has one report per actor.
    """
    if machines > 1 and not (guarded and all(guarded)):
        raise RequestError(
            f"this Ray has {machines} machines and asks for no token: anyone who reaches it runs code on them; "
            f"start it with {AUTH_VARIABLE}=token"
        )


REGISTRY = "registry"  # name of the registry's actor
PLACED_SECONDS = 60.0  # seconds that members may wait for placement before a warning


class RayFleet:
    """Implements `foreword cluster up` with Ray. On a Ray that was already running, the actors outlive this process."""

    def __init__(self, cluster: ClusterConfig) -> None:
        assert cluster.ray is not None
        self._cluster = cluster
        self._ray = import_ray()
        address = cluster.ray.address
        _log.info("%s ...", f"connecting to Ray at {address}" if address else "starting Ray on this machine")
        is_shared = connect(self._ray, cluster.ray, cluster.cpus)
        self._lifetime = "detached" if is_shared else None  # Ray's: detached actors outlive this process
        self._namespace = cluster.ray.namespace
        self._actors: dict[str, Any] = {}  # by the member's name
        self._member_log = MemberLog()
        self.stopped = Stopping()
        self._registry = self._start_actor(MemberRegistry, REGISTRY, num_cpus=0)

    def up(self) -> None:
        """Start missing members; raise `RequestError` if Ray spans machines without authentication."""
        _log.info("Ray is there; starting the registry ...")
        self._ray.get(self._registry.members.remote())  # wait until it runs
        self.find()
        placed = self._place()
        for member in self._cluster.members:
            self.add(member, placed.get(member.name))
        self._check_token()
        scale = self._cluster.scale
        if scale is not None:
            resize(self, self._cluster.member(scale.node), scale.least)

    def find(self) -> None:
        """Find the actors of an earlier `up`."""
        for name in self._ray.util.list_named_actors():
            if name != REGISTRY:
                self._actors[name] = self._ray.get_actor(name, self._namespace)

    def run(self, and_then: Callable[[], None]) -> None:
        """Call `and_then` periodically until `stopped` is set; then end all members."""
        try:
            while not self.stopped.wait(CHECK_SECONDS):
                with suppress(self._ray.exceptions.RayError):  # the registry is restarting
                    and_then()
        finally:
            self.down()

    def members(self) -> list[MemberStatus]:
        statuses = self._ray.get(self._registry.members.remote(), timeout=MAX_REPLY_SECONDS)
        members = [MemberStatus(**status) for status in statuses]
        self._member_log.log_changes(members)
        return members

    def names(self) -> list[str]:
        return list(self._actors)

    def drop(self, name: str) -> None:
        """Remove a node; it ends after notifying its targets."""
        actor = self._actors.pop(name, None)
        if actor is not None:
            self._end([actor])
        self._registry.leave.remote(name)  # after its end: a node that still runs would register again

    def down(self) -> None:
        """End routers, then targets, then nodes, and leave Ray: a node that ends later need not drain."""
        kinds = {member.name: member.kind for member in self._cluster.members}
        for kind in (ROUTER, TARGET, NODE):
            self._end([actor for name, actor in self._actors.items() if kinds.get(name, NODE) == kind])
        self._ray.kill(self._registry)
        for target in self._cluster.members:
            with suppress(ValueError):  # the target has no placement group
                self._ray.util.remove_placement_group(self._ray.util.get_placement_group(self._group(target)))
        self._ray.shutdown()

    def _end(self, actors: list[Any]) -> None:
        """Stop the members of these actors at the same time, then end the actors."""
        stopping = [actor.stop.remote() for actor in actors]
        for actor, reply in zip(actors, stopping, strict=True):
            with suppress(self._ray.exceptions.RayError):
                self._ray.get(reply)
            self._ray.kill(actor)

    def _place(self) -> dict[str, Any]:
        """Place targets and the nodes near them; return Ray's scheduling strategy of these members, by name."""
        placed: dict[str, Any] = {}
        for target in self._cluster.members:
            together = [target, *map(self._cluster.member, target.near)]
            if len(together) == 1 or target.name in self._actors:
                continue
            _log.info("placing %s ...", " beside ".join(member.name for member in together))
            group = self._ray.util.placement_group(
                [_bundle(member) for member in together],
                strategy="STRICT_PACK" if target.is_strict else "PACK",
                name=self._group(target),
                lifetime=self._lifetime,
            )
            if not group.wait(PLACED_SECONDS):
                names = " and ".join(member.name for member in together)
                _log.warning("Ray has no room for %s yet: %s", names, list(map(_bundle, together)))
            for index, member in enumerate(together):
                placed[member.name] = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                )
        return placed

    def add(self, member: Member, strategy: Any | None = None) -> None:  # noqa: ANN401 - Ray's
        """Start a member's actor, or find it; `strategy` None: Ray places it anywhere."""
        options = {"num_cpus": member.cpus, "num_gpus": member.gpus}
        if strategy is not None:
            options["scheduling_strategy"] = strategy
        resources = ", ".join(f"{amount:g} {name}" for name, amount in _bundle(member).items())
        _log.info("%s waits for its place (%s)", member.name, resources)
        self._actors[member.name] = self._start_actor(
            RayMember, member.name, member, self._namespace, **options
        )

    def _start_actor(self, actor_class: type, name: str, *arguments: object, **options: Any) -> Any:  # noqa: ANN401 - Ray's
        """Return the actor with this name: the one of an earlier `up` if it still runs, otherwise a new one."""
        options |= {"name": name, "lifetime": self._lifetime, "get_if_exists": True, "max_restarts": -1}
        return self._ray.remote(actor_class).options(**options).remote(*arguments)

    def _group(self, target: Member) -> str:
        """Return the name of a target's placement group."""
        return f"{self._namespace}/{target.name}"

    def _check_token(self) -> None:
        """End all members and raise `RequestError` if Ray has several machines and needs no token."""
        hosts = {node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]}
        if len(hosts) <= 1:
            return
        replies = [actor.is_guarded.remote() for actor in self._actors.values()]
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

        def report(status: dict[str, Any]) -> Any:  # noqa: ANN401 - Ray's
            registry = ray.get_actor(REGISTRY, namespace)
            return ray.get(registry.report.remote(status), timeout=MAX_REPLY_SECONDS)

        context = ray.get_runtime_context()
        node_id = context.get_node_id()
        machine = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id)
        super().__init__(member, machine, report, has_run=context.was_current_actor_reconstructed)
        self.run()


def _bundle(member: Member) -> dict[str, float]:
    """Return the resources that Ray reserves for a member."""
    return {"CPU": member.cpus} | ({"GPU": member.gpus} if member.gpus else {})
