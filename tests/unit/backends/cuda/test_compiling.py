"""Kernels that are compiled elsewhere: what is requested, loaded and waited for. The compiler is a stand-in."""

import ast
import logging
from collections import deque
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from foreword.backends import cuda
from helpers.clocks import ScriptedClock
from helpers.cuda import needs_triton

pytestmark = needs_triton

FAILED = "kernels could not be compiled in advance, so each is compiled at its first use"


class Compiler:
    """Compiles what it is told to, when it is told to."""

    def __init__(self, clock: ScriptedClock) -> None:
        self.clock, self.sent, self.results = clock, [], deque[tuple[Any, str]]()

    def compile(self, variant: Any) -> None:
        self.sent.append(variant)

    def done(self, timeout: float) -> tuple[Any, str] | None:
        if not self.results and timeout:
            self.clock.pass_by(timeout)
        return self.results.popleft() if self.results else None


class World:
    """Kernels of a GPU with a cache on disk; loading one takes a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, on_disk: str = "") -> None:
        from foreword.backends.cuda.compiling import Kernels
        from foreword.kernels.launching import NotCompiledError
        from foreword.kernels.recording import Variant

        self.clock, self.on_disk, self.loads = ScriptedClock(), set(on_disk), list[str]()
        self.compiler: Any = Compiler(self.clock)
        self.kernels = Kernels(self.compiler, self.clock)
        self.variant = lambda name: Variant("module", name, "")
        world = self

        class Kernel:
            def __init__(self, name: str) -> None:
                self.name = name

            def load(self, data: str) -> None:
                if self.name not in world.on_disk:
                    raise NotCompiledError(self.name)
                world.clock.pass_by(1.0)
                world.loads.append(self.name)

        monkeypatch.setattr(Variant, "function", property(lambda variant: Kernel(variant.kernel)))

    def named(self, names: str) -> list[Any]:
        return [self.variant(name) for name in names]

    def finish(self, names: str, error: str = "") -> None:
        for name in names:
            if not error:
                self.on_disk.add(name)
            self.compiler.results.append((self.variant(name), error))


def test_what_is_on_disk_is_loaded_and_the_rest_compiled_once(monkeypatch: pytest.MonkeyPatch):
    world = World(monkeypatch, on_disk="b")
    world.kernels.request(world.named("abc"))
    world.kernels.request(world.named("cab"))
    assert world.loads == ["b"] and world.compiler.sent == world.named("ac")
    assert (world.kernels.loaded, world.kernels.pending) == (1, 2)
    assert world.kernels.are_ready(world.named("b")) and not world.kernels.are_ready(world.named("ab"))


def test_what_is_compiled_is_loaded_within_a_bound_of_time(monkeypatch: pytest.MonkeyPatch):
    world = World(monkeypatch)
    world.kernels.request(world.named("abc"))
    world.finish("cab")
    world.kernels.advance(1.5)
    assert world.loads == ["c", "a"] and world.kernels.pending == 1
    world.kernels.advance(1.5)
    assert world.kernels.are_ready(world.named("abc")) and not world.kernels.pending


def test_waiting_ends_with_the_time_or_with_the_kernels(monkeypatch: pytest.MonkeyPatch):
    world = World(monkeypatch)
    world.kernels.request(world.named("ab"))
    world.finish("b")
    assert not world.kernels.wait(world.named("a"), world.clock() + 5)
    world.finish("a")
    assert world.kernels.wait(world.named("ab"))


def test_a_kernel_that_cannot_be_compiled_elsewhere_is_left_to_its_launch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    world = World(monkeypatch)
    world.kernels.request(world.named("abc"))
    world.finish("a", "no such architecture")
    world.compiler.results.append((None, "the compile process ended with exit code 1"))
    with caplog.at_level(logging.WARNING):
        assert world.kernels.wait(world.named("abc"))
    assert not world.loads and not world.kernels.pending
    assert [record.getMessage() for record in caplog.records] == [
        f"1 {FAILED}: no such architecture",
        f"2 {FAILED}: the compile process ended with exit code 1",
    ]


def test_a_kernel_that_is_lost_from_the_disk_is_left_to_its_launch(monkeypatch: pytest.MonkeyPatch):
    world = World(monkeypatch)
    world.kernels.request(world.named("a"))
    world.compiler.results.append((world.variant("a"), ""))
    assert world.kernels.wait(world.named("a")) and not world.kernels.loaded


@pytest.mark.parametrize(
    "path", sorted(Path(cuda.__path__[0]).glob("kernels/*.py")), ids=lambda path: path.stem
)
def test_every_kernel_that_is_launched_can_be_recorded(path: Path):
    from foreword.kernels.launching import Kernel

    module = import_module(f"{cuda.__name__}.kernels.{path.stem}")
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    launched = {
        func.value.id
        for func in calls
        if isinstance(func, ast.Subscript) and isinstance(func.value, ast.Name)
    }
    for name in launched - {"copy", "dict", "tuple", "list"}:
        assert isinstance(getattr(module, name), Kernel), name
