"""Signals that come when they like."""

import os
import signal
import subprocess
import sys
import threading

from foreword.cluster.pools.running import Stopping


def test_a_handler_may_interrupt_itself(monkeypatch):
    """As it does where two signals come at once: the second while the first is being noted."""
    stopping, depth = Stopping(), 0
    noted = Stopping.set

    def set_slowly(self: Stopping) -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            os.kill(os.getpid(), signal.SIGTERM)  # handled before the next line
        noted(self)

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    monkeypatch.setattr(Stopping, "set", set_slowly)
    try:
        stopping.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopping.wait(60)
        assert depth == 2
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)


def test_a_storm_of_signals_ends_a_process_that_waits():
    program = (
        "from foreword.cluster.pools.running import Stopping; "
        "s = Stopping().listen(); print(flush=True); s.wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    for _ in range(50):
        process.send_signal(signal.SIGTERM)
    assert process.wait(60) in (0, -signal.SIGTERM)  # one may come when its handlers are gone already


def test_it_can_be_asked_from_another_thread_and_waits_no_longer_than_it_is_told():
    stopping = Stopping()
    assert not stopping.wait(0.0)
    threading.Thread(target=stopping.set).start()
    assert stopping.wait(60)
    assert stopping.is_set()
