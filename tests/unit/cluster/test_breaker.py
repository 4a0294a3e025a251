"""When a node is waited for."""

from foreword.cluster.waiting import MOST_NEEDED, CircuitBreaker


def closed() -> CircuitBreaker:
    breaker = CircuitBreaker()
    breaker.record_timely()
    assert not breaker.is_open
    return breaker


def test_a_node_is_not_waited_for_before_it_has_said_something():
    assert CircuitBreaker().is_open
    assert closed().trips == 0


def test_after_one_missed_deadline_it_is_not_waited_for_until_it_answers_in_time():
    breaker = closed()
    breaker.record_late(0.0123)
    assert breaker.is_open
    assert breaker.reason == "no answer after 12.3 ms"
    breaker.record_timely()
    assert not breaker.is_open
    assert not breaker.reason


def test_a_node_that_keeps_being_late_has_to_show_more_each_time():
    breaker, needed = closed(), []
    for _ in range(9):
        breaker.record_late(0.1)
        answers = 0
        while breaker.is_open:
            breaker.record_timely()
            answers += 1
        needed.append(answers)
    assert needed[:4] == [1, 2, 4, 8]
    assert needed[-1] == MOST_NEEDED
    assert breaker.trips == 9


def test_a_calm_time_is_remembered_in_its_favour():
    breaker = closed()
    for _ in range(4):
        breaker.record_late(0.1)
        while breaker.is_open:
            breaker.record_timely()
    for _ in range(10):
        breaker.record_timely()
    breaker.record_late(0.1)
    breaker.record_timely()
    assert not breaker.is_open


def test_being_late_twice_while_it_is_open_counts_once():
    breaker = closed()
    breaker.record_late(0.1)
    breaker.record_late(0.1)
    assert breaker.trips == 1
    breaker.record_loss("it hung up")
    assert breaker.trips == 1
    assert breaker.reason == "it hung up"


def test_a_node_that_became_slower_is_believed_when_that_is_what_is_expected_of_it():
    breaker = closed()
    assert breaker.is_timely(9.0, usual=0.001)  # it was not late
    breaker.record_late(0.003)
    assert breaker.is_timely(0.002, usual=0.001)
    assert not breaker.is_timely(0.02, usual=0.001)
    assert breaker.is_timely(0.02, usual=0.015)
    breaker.record_timely()
    assert breaker.is_timely(9.0, usual=0.001)
    breaker.record_late(0.003)
    breaker.record_loss("it hung up")
    assert breaker.is_timely(9.0, usual=0.001)  # of another connection nothing is known
