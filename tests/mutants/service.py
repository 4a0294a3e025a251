"""Defects of adapters, priorities and deadlines."""

from catalogue import UNIT, Mutant

ADAPTERS = "tests/integration/test_adapter_engine.py"
SERVICE = f"{UNIT}/engine/service"

SERVICE_MUTANTS = (
    Mutant(
        91,
        "a page that one adapter computed is served to another",
        "engine/adapters.py",
        '        return f"{tenant}\\0{self.serial}"',
        "        return tenant",
        (f"{ADAPTERS}::test_a_page_of_one_adapter_is_never_served_to_another",),
    ),
    Mutant(
        91,
        "an adapter finds the pages of another that had its name",
        "engine/adapters.py",
        '        return f"{tenant}\\0{self.serial}"',
        '        return f"{tenant}\\0{self.name}"',
        (f"{ADAPTERS}::test_an_adapter_of_the_same_name_does_not_find_the_pages_of_the_one_before",),
    ),
    Mutant(
        91,
        "an adapter is taken away from requests that run",
        "engine/adapters.py",
        "        if adapter.is_leaving and not adapter.users:",
        "        if adapter.is_leaving and adapter in self._leaving:",
        (f"{ADAPTERS}::test_an_adapter_that_is_unloaded_serves_those_who_have_it_to_their_end",),
    ),
    Mutant(
        91,
        "guesses of a request are computed without its adapter",
        "speculation/transaction.py",
        "                entry.request.adapter_slot,",
        "                0 if len(draft) else entry.request.adapter_slot,",
        (f"{ADAPTERS}::test_guesses_change_no_text_and_are_counted_by_adapter",),
    ),
    Mutant(
        91,
        "on a GPU all rows of a pass have the adapter of its first request",
        "backends/cuda/layout.py",
        "slots[cut.requests] if len(slots) else slots",
        "slots[cut.requests * 0] if len(slots) else slots",
        ("tests/integration/test_cuda_adapters.py::test_logits_are_those_of_merged_weights",),
    ),
    Mutant(
        92,
        "who has waited too long has no place of its own",
        "engine/service/order.py",
        "        lane_is_open = sum(request.is_aged for request in running) < self._lane",
        "        lane_is_open = False",
        (f"{SERVICE}/test_order.py::test_nobody_starves",),
    ),
    Mutant(
        92,
        "a request that had waited too long is put off again",
        "engine/service/order.py",
        "    return not running.is_aged and running.service.slo > request.service.slo",
        "    return running.service.slo > request.service.slo",
        (f"{SERVICE}/test_order.py::test_nobody_starves",),
    ),
    Mutant(
        92,
        "the same requests of the other classes are served in every short pass",
        "engine/service/rows.py",
        "    others.sort(key=lambda request: (request.served, request.request_id))",
        "    others.sort(key=lambda request: request.request_id)",
        (f"{SERVICE}/test_latency_class.py::test_others_take_turns_in_a_short_pass",),
    ),
    Mutant(
        92,
        "passes are as long as without the latency class",
        "engine/stepping/scheduler.py",
        "        if (limit := tightest(requests)) is not None:",
        "        if (limit := tightest(requests)) is not None and limit < 0:",
        (
            f"{SERVICE}/test_latency_class.py::test_under_fourfold_overload_the_latency_class_keeps_its_time_per_token",
        ),
    ),
    Mutant(
        92,
        "a tenant with many requests gets all places",
        "engine/service/order.py",
        "            share = held[request.tenant] / service.weight",
        "            share = 0.0",
        (f"{SERVICE}/test_order.py::test_tenants_share_the_places_by_weight",),
    ),
    Mutant(
        93,
        "a deadline counts from when the request begins",
        "engine/service/deadlines.py",
        "    if now >= deadline.at:",
        "    if request.ledger.started is not None and now >= deadline.at:",
        (f"{SERVICE}/test_deadlines.py::test_one_that_waits_past_its_deadline_is_told_so",),
    ),
)
