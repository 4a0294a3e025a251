"""What masks may cost: so much for every token, and an excess of the request and of its tenant."""

from foreword.structured.limits import MaskLimits
from foreword.structured.masks import MaskBudget, TenantBudgets
from helpers.clocks import ScriptedClock

LIMITS = MaskLimits(
    one_mask=0.5, free_per_token=0.25, request_excess=1.0, tenant_excess=1.5, tenant_refill=0.5
)


def test_masks_within_what_tokens_may_cost_are_free_for_ever():
    budget = MaskBudget(TenantBudgets(LIMITS, ScriptedClock()))
    for _ in range(1000):
        assert budget.spend(0.25) is None
        budget.earn(1)


def test_one_mask_that_takes_too_long_ends_the_answer():
    assert "longer than 0.5 s" in str(MaskBudget(TenantBudgets(LIMITS)).spend(0.51))


def test_an_answer_ends_when_its_masks_have_taken_too_much_in_all():
    budget = MaskBudget(TenantBudgets(LIMITS, ScriptedClock()))
    spent = []
    for _ in range(6):
        spent.append(budget.spend(0.5))
        budget.earn(1)
    assert spent[:4] == [None] * 4  # 4 * 0.5 - 4 * 0.25 is the excess that it may have
    assert "its masks took over 1 s more than allowed for its tokens" in str(spent[4])


def test_the_excess_of_a_tenant_is_that_of_all_its_requests_and_comes_back():
    now = ScriptedClock()
    tenants = TenantBudgets(LIMITS, now)

    def excess(tenant: str) -> str | None:
        """Of 0.75 s, by a request of its own."""
        budget = MaskBudget(tenants, tenant)
        return budget.spend(0.5) or budget.spend(0.5)

    assert [excess("a"), excess("a")] == [None, None]
    assert "all requests of this tenant" in str(excess("a"))
    assert excess("b") is None
    now.pass_by(3.0)  # what is over the limit counts as well
    assert excess("a") is None
    now.pass_by(100.0)
    assert excess("b") is None
    assert list(tenants._used) == ["b"]  # nothing is kept of a tenant that owes nothing


def test_a_tenant_that_has_waited_long_has_no_credit():
    now = ScriptedClock()
    tenants = TenantBudgets(LIMITS, now)
    assert tenants.spend("a", 0.1)
    now.pass_by(100.0)
    assert not tenants.spend("a", 1.6)


def test_an_excess_that_tokens_have_earned_back_is_neither_refunded_nor_charged_twice():
    tenants = TenantBudgets(LIMITS, ScriptedClock())
    budget = MaskBudget(tenants, "a")
    budget.spend(0.5)
    for _ in range(10):
        budget.earn(1)
        budget.spend(0.125)
        assert tenants._used["a"][0] == 0.25
    assert not budget.has_excess
