"""Bodies that no client should send, and every server gets. None may do more than earn a refusal."""

import json

HUGE_TEXT = "a " * (5 * 1024 * 1024)


def _completion(**fields: object) -> bytes:
    return json.dumps({"prompt": "hi", "max_tokens": 2} | fields).encode()


def _raw(field: str) -> bytes:
    return b'{"prompt": "hi", "max_tokens": 2, ' + field.encode() + b"}"


HOSTILE_BODIES: dict[str, bytes] = {
    "empty": b"",
    "not json": b"{",
    "a number": b"1",
    "a list": b"[]",
    "null": b"null",
    "a string": b'"prompt"',
    "trailing": b'{"prompt": "hi"} x',
    "bad utf-8": b'{"prompt": "\xff\xfe"}',
    "overlong utf-8": b'{"prompt": "\xc0\xaf"}',
    "utf-16": '{"prompt": "hi"}'.encode("utf-16"),
    "lone surrogate in the prompt": b'{"prompt": "\\ud800"}',
    "lone surrogate in a stop": _raw('"stop": "\\udfff"'),
    "lone surrogate in a key": b'{"prompt": "hi", "\\ud800": 1}',
    "lone surrogate in the model": _raw('"model": "\\ud83d"'),
    "lone surrogate in speculation": _raw('"speculation": {"method": "\\ud83d"}'),
    "NaN": _raw('"temperature": NaN'),
    "Infinity": _raw('"temperature": Infinity'),
    "minus Infinity": _raw('"temperature": -Infinity'),
    "overflowing float": _raw('"temperature": 1e999'),
    "NaN in a bias": _raw('"logit_bias": {"5": NaN}'),
    "huge integer": _raw('"seed": ' + "9" * 5000),
    "huge max_tokens": _raw('"max_tokens": ' + "9" * 19),
    "huge n": _raw('"n": 1000000000'),
    "negative n": _raw('"n": -1'),
    "n as text": _raw('"n": "1"'),
    "n as true": _raw('"n": true'),
    "n as float": _raw('"n": 1.5'),
    "negative temperature": _raw('"temperature": -1'),
    "top_p of 0": _raw('"top_p": 0'),
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "deep inside a field": _raw('"logit_bias": ' + "[" * 500 + "]" * 500),
    "deep speculation": _raw('"speculation": ' + '{"method":' * 20 + "1" + "}" * 20),
    "ten thousand stops": _completion(stop=[f"s{i}" for i in range(10_000)]),
    "an empty stop": _completion(stop=""),
    "a very long stop": _completion(stop="x" * 100_000),
    "a hundred thousand bad stops": _completion(stop=[1] * 100_000),
    "ten thousand bad words": _completion(bad_words=["w"] * 10_000),
    "logprobs": _completion(logprobs=10_000),
    "a hundred thousand unknown fields": json.dumps({f"f{i}": 1 for i in range(100_000)}).encode(),
    "a big bias": _completion(logit_bias={str(i): 1 for i in range(50_000)}),
    "a bias for no token": _completion(logit_bias={"x": 1}),
    "a bias for a huge token": _completion(logit_bias={"9" * 30: 1}),
    "a bias that is too strong": _completion(logit_bias={"5": 1000}),
    "a token id out of the vocabulary": _completion(prompt=[2_000_000_000]),
    "a negative token id": _completion(prompt=[-1]),
    "token ids and texts": _completion(prompt=[1, "a"]),
    "a million prompts": _completion(prompt=["a"] * 100_000),
    "nothing to say": _completion(prompt=[]),
    "nothing inside": _completion(prompt=[[]]),
    "an empty text": _completion(prompt=""),
    "a prompt of ten megabytes": _completion(prompt=HUGE_TEXT),
    "a prompt of one megabyte": _completion(prompt=HUGE_TEXT[:1_000_000]),
    "a prompt of a million tokens": _completion(prompt=[5] * 500_000),
    "a hundred thousand messages": json.dumps(
        {"messages": [{"role": "user", "content": "a"}] * 20_000}
    ).encode(),
    "messages that are numbers": json.dumps({"messages": [1] * 100_000}).encode(),
    "an image": json.dumps(
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}],
                }
            ]
        }
    ).encode(),
    "tools": _completion(tools=[{}]),
    "speculation by a path": _completion(speculation={"method": "draft_model", "model": "/etc/passwd"}),
    "speculation with a file": _completion(speculation={"method": "suffix", "warm_file": "/etc/passwd"}),
    "speculation of a huge depth": _completion(
        speculation={"method": "ngram", "num_speculative_tokens": 10**9}
    ),
    "speculation of a huge lookup": _completion(speculation={"method": "ngram", "prompt_lookup_max": 10**9}),
    "speculation as text": _completion(speculation="magic"),
    "max_tokens of 0": _completion(max_tokens=0),
    "min above max": _completion(min_tokens=5),
    "no allowed token": _completion(allowed_token_ids=[]),
    "seed of -2**70": _raw('"seed": -1180591620717411303424'),
    "bytes": bytes(range(256)),
    "zeros": bytes(100_000),
}
