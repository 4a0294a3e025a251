"""Defects of the HTTP side: keys, ambiguous requests, fields that are not implemented, answers that break off."""

from catalogue import UNIT, Mutant

CONNECTIONS = f"{UNIT}/server/test_connections.py"
FIELDS = "tests/integration/test_server_refused_fields.py"
LEARNING = "tests/integration/test_server_learning.py"
LINK = "tests/integration/test_server_engine_link.py"
ROUTER = f"{UNIT}/server/test_router.py"
ROUTES = "tests/integration/test_server_routes.py"
STEERING = f"{UNIT}/engine/policy/test_controller.py"

SERVING_MUTANTS = (
    Mutant(
        99,
        "any tenant switches speculation for all of them",
        "server/ops_routes.py",
        "check_admin",
        "caller_of(request).is_admin",
        "caller_of(request).trusted",
        (f"{ROUTES}::test_without_an_admin_key_no_tenant_switches_for_all",),
    ),
    Mutant(
        99,
        "a tenant deletes the texts of another one",
        "server/learn_routes.py",
        "_forgettable",
        "not own or name != own",
        "not own",
        (f"{LEARNING}::test_a_tenant_deletes_its_own_texts_and_an_admin_those_of_all",),
    ),
    Mutant(
        99,
        "a caller without a key deletes the texts of all that have none",
        "server/learn_routes.py",
        "_forgettable",
        "not own or name != own",
        "name != own",
        (f"{LEARNING}::test_callers_without_a_key_who_share_a_tenant_need_an_admin",),
    ),
    Mutant(
        99,
        "a request with two lengths is read by one of them",
        "server/connections.py",
        "CheckedConnection.next_event",
        "{b'content-length', b'transfer-encoding'}",
        "{b'content-length', b'transfer-encoding', b'te'}",
        (f"{CONNECTIONS}::test_a_body_with_two_lengths_is_refused_and_its_connection_closed",),
    ),
    Mutant(
        99,
        "a field that changes the answer is ignored",
        "server/api/bodies.py",
        "UnknownFields._check",
        "foreign.reason or self._is_strict",
        "self._is_strict",
        (f"{FIELDS}::test_what_would_change_the_answer_is_refused_by_name",),
    ),
    Mutant(
        99,
        "tenants of a router are not told apart by X-API-Key",
        "server/router/relay.py",
        "_tenant",
        "'\\x00'.join(given_keys(request.headers)).encode('utf-8', 'surrogateescape')",
        "request.headers.get('authorization', '').encode('latin-1', 'replace')",
        (f"{ROUTER}::test_tenants_are_told_apart_by_either_header",),
    ),
    Mutant(
        99,
        "a router counts an answer that broke off by the status it began with",
        "server/router/relay.py",
        "_ForwardedRequest._forward_answer",
        "str(answer.status_code) if is_complete else BROKEN",
        "str(answer.status_code)",
        (f"{ROUTER}::test_an_answer_that_breaks_off_is_not_counted_as_its_status",),
    ),
    Mutant(
        99,
        "an idle engine does not see that its policy file has changed",
        "engine/engine.py",
        "Engine._take_mail",
        "self._mail.get(may_wait, self._core.idle_seconds)",
        "self._mail.get(may_wait)",
        (f"{STEERING}::test_an_idle_engine_reads_a_changed_file",),
    ),
    Mutant(
        99,
        "a delta that fits into no frame leaves its request without an end",
        "wire/process.py",
        "EngineHost._forward",
        "self._send_alone(item)",
        "self._channel.send(wire.Deltas([item]))",
        (f"{LINK}::test_prompt_logprobs_that_fit_into_no_frame_end_their_request_alone",),
    ),
)
