"""What is said of a node's distance."""

from foreword.bench.link import LinkReport, PassCost


def report(levels: float, level_ms: float | None) -> LinkReport:
    return LinkReport("node", 0.1, 0.2, (PassCost(1, 10, 0.1, 0.0, levels, 1.0, level_ms),))


def test_how_far_a_node_may_be_is_not_said_where_none_of_its_levels_came():
    assert report(0.0, None).break_even_ms(0.8, 5, 15.0) is None
    assert report(0.0, 3.0).break_even_ms(0.8, 5, 15.0) is None


def test_what_drafting_takes_is_not_left_for_the_way():
    assert report(2.0, 2.0).break_even_ms(0.5, 2, 10.0) == 7.5 - 4.0
    assert report(2.0, None).break_even_ms(0.5, 2, 10.0) == 7.5
