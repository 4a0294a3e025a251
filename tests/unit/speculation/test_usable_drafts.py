"""What of a draft a request can use."""

from foreword.speculation.draft import NO_DRAFT, Draft
from foreword.speculation.proposing import usable_part
from helpers.asks import ask, text_request


def test_a_draft_from_before_the_request_was_rebuilt_is_dropped():
    request = text_request([1, 2, 3], epoch=1)
    assert usable_part(Draft.chain([5, 6], 3, epoch=0), ask(request)) is NO_DRAFT
    assert usable_part(Draft.chain([5, 6], 3, epoch=1), ask(request)).tokens == (5, 6)
