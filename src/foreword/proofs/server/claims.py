"""All claims about a server: what each promises, how many requests it takes, and what is compared."""

from collections.abc import Callable, Sequence

from foreword.proofs.server.checks import distributions, requests, texts
from foreword.proofs.server.checks.requests import complete, streamed
from foreword.proofs.server.comparing import agree, every_case, requests_for
from foreword.proofs.server.context import Check, ProofContext, without_logprobs, without_plain

ALONE = ("seed alone",)


def per_prompt(count: int) -> Callable[[ProofContext], int]:
    """Return the number of requests of a check that sends `count` for every prompt."""
    return lambda context: count * context.plan.prompts


CHECKS: Sequence[Check] = (
    Check(
        "seed alone",
        "the same request with the same seed gets the same text, and so does a greedy one",
        per_prompt(4),
        agree(requests.all_bodies, (complete, complete), ("the first", "the second")),
    ),
    Check(
        "streamed equals whole",
        "the chunks of a stream add up to the text and finish reason of the whole answer",
        per_prompt(4),
        agree(requests.all_bodies, (complete, streamed), ("whole", "streamed")),
        ALONE,
    ),
    Check(
        "greedy with and without speculation",
        "a greedy text is the same with speculation and without",
        per_prompt(2),
        agree(requests.greedy_bodies, (requests.without_speculation, complete), ("without", "with")),
        ALONE,
        without_plain,
    ),
    Check(
        "seed in a batch",
        "a seeded request gets the same text alone and beside others",
        lambda context: context.plan.prompts * (1 + context.plan.at_once),
        every_case(requests.in_a_batch, lambda context: f"{context.plan.at_once} at once"),
        ALONE,
    ),
    Check(
        "seed after other traffic",
        "a seeded request gets the same text before and after other requests",
        per_prompt(4),
        agree(requests.seeded_bodies, (complete, requests.after_traffic), ("before", "after")),
        ALONE,
    ),
    Check(
        "usage",
        "usage counts the tokens that were written, and its total is the sum",
        per_prompt(4),
        every_case(texts.usage),
    ),
    Check(
        "logprobs",
        "log probabilities form a distribution, greedy takes their largest, and a re-score repeats them",
        lambda context: context.plan.prompts * (1 + distributions.PLACES + (context.plain is not None)),
        distributions.logprobs,
        ALONE,
        without_logprobs,
    ),
    Check(
        "offsets",
        "the listed tokens are those of the text, each at its offset",
        per_prompt(2),
        every_case(texts.offsets),
        skipped=without_logprobs,
    ),
    Check(
        "stop",
        "an answer with a stop text is the answer without it, up to where the stop text begins",
        per_prompt(1 + 2 * texts.STOPS),
        every_case(texts.stops),
        (*ALONE, "streamed equals whole"),
    ),
    Check(
        "ends",
        "finish_reason is right: stop texts go no further with more room, cut ones do",
        per_prompt(4),
        texts.ends,
        ALONE,
    ),
    Check(
        "n",
        f"a request with n = {requests.N} gets {requests.N} answers that are drawn each by itself",
        per_prompt(1),
        requests.several,
        ("logprobs",),
    ),
    Check(
        "penalties",
        "presence_penalty changes a greedy text where it must",
        per_prompt(2),
        every_case(
            requests.penalties, without="no answer repeats a token that another is nearly as likely as"
        ),
        (*ALONE, "logprobs"),
        without_logprobs,
    ),
    Check(
        "logit_bias",
        "logit_bias of +100 makes an answer of that token alone",
        lambda _: 1 + len(requests.BIASED_TOKENS),
        every_case(requests.bias),
        ALONE,
    ),
    Check(
        "distribution against own logprobs",
        "at temperature 1 tokens are drawn with the chances that the server's log probabilities tell",
        requests_for,
        distributions.own_distribution,
        ("logprobs", "n"),
        without_logprobs,
    ),
    Check(
        "distribution with and without speculation",
        "texts have the same distribution with speculation and without",
        lambda context: 2 * requests_for(context),
        distributions.without_speculation,
        ("n",),
        without_plain,
    ),
)
"""Each check comes after those it depends on."""
