"""JSON schemas that are made of others: combinations, references, whole documents."""

from helpers.schema_kinds import Made, closed


def combinations() -> Made:
    yield "any of two", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, (1, "x"), (None, [])
    yield (
        "any of objects",
        {"anyOf": [closed(a={"type": "integer"}), closed(b={"type": "string"})]},
        ({"a": 1}, {"b": "x"}),
        ({"a": "x"}, {"c": 1}),
    )
    yield (
        "any of ranges",
        {"anyOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 90}]},
        (1, 95),
        (50,),
    )
    yield (
        "any of many",
        {"anyOf": [closed(kind={"const": f"k{i}"}, value={"type": "integer"}) for i in range(20)]},
        ({"kind": "k7", "value": 1},),
        ({"kind": "k77", "value": 1},),
    )
    yield "one of kinds", {"oneOf": [{"type": "integer"}, {"type": "boolean"}]}, (1, True), ("x",)
    yield (
        "one of tagged",
        {
            "oneOf": [
                closed(kind={"const": "a"}, x={"type": "integer"}),
                closed(kind={"const": "b"}, y={"type": "string"}),
            ]
        },
        ({"kind": "a", "x": 1}, {"kind": "b", "y": "z"}),
        ({"kind": "a", "y": "z"},),
    )
    yield (
        "all of ranges",
        {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]},
        (3, 5),
        (2, 6),
    )
    yield (
        "all of objects",
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]},
            ]
        },
        ({"a": 1, "b": 2},),
        ({"a": 1},),
    )
    yield (
        "optional value",
        closed(a={"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ({"a": None}, {"a": "x"}),
        ({"a": 1},),
    )
    yield "anything", {}, (1, "x", None, [1, {"a": []}]), ()
    for count in (2, 3, 5, 8):
        listed = {"anyOf": [{"const": f"w{i}"} for i in range(count)]}
        yield f"any of {count} words", listed, ("w0", f"w{count - 1}"), (f"w{count}",)


def references() -> Made:
    point = closed(x={"type": "number"}, y={"type": "number"})
    for root in ("$defs", "definitions"):
        ref = {"$ref": f"#/{root}/point"}
        yield (
            f"reference {root}",
            {root: {"point": point}, **closed(p=ref)},
            ({"p": {"x": 1, "y": 2}},),
            ({"p": 1},),
        )
        yield (
            f"list of references {root}",
            {root: {"point": point}, "type": "array", "items": ref},
            ([{"x": 1, "y": 2}],),
            ([1],),
        )
    tree = {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    }
    yield (
        "tree",
        tree,
        ({"value": 1}, {"value": 1, "children": [{"value": 2, "children": []}]}),
        ({"children": []},),
    )
    linked = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
        "required": ["next"],
        "additionalProperties": False,
    }
    yield "linked list", linked, ({"next": None}, {"next": {"next": None}}), ({"next": 1},)
    both = {
        "$defs": {
            "a": closed(b={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/b"}]}),
            "b": closed(a={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}),
        },
        "$ref": "#/$defs/a",
    }
    yield "mutual", both, ({"b": {"a": {"b": None}}},), ({"a": None},)
    sums = {
        "$defs": {
            "e": {
                "anyOf": [
                    {"type": "integer"},
                    closed(op={"enum": ["+", "*"]}, left={"$ref": "#/$defs/e"}, right={"$ref": "#/$defs/e"}),
                ]
            }
        },
        "$ref": "#/$defs/e",
    }
    yield (
        "expressions",
        sums,
        (1, {"op": "+", "left": 1, "right": {"op": "*", "left": 2, "right": 3}}),
        ({"op": "-"},),
    )


def odd_texts() -> Made:
    for key in ("naïve", "日本語", "😀", 'with "quotes"', "back\\slash", "tab\tkey", "a b c"):
        yield f"key {key!r}", closed(**{key: {"type": "integer"}}), ({key: 1},), ({"other": 1},)
    yield (
        "escaped values",
        {"enum": ["line\nbreak", "\u0001", "</script>"]},
        ("line\nbreak",),
        ("line break",),
    )


def documents() -> Made:
    person = closed(name={"type": "string"}, age={"type": "integer", "minimum": 0}, email={"type": "string"})
    yield "person", person, ({"name": "Ann", "age": 5, "email": "a@b"},), ({"name": "Ann"},)
    line = closed(text={"type": "string"}, price={"type": "number"}, count={"type": "integer"})
    invoice = closed(
        number={"type": "string", "pattern": "^R-[0-9]+$"}, lines={"type": "array", "items": line}
    )
    yield (
        "invoice",
        invoice,
        ({"number": "R-1", "lines": [{"text": "x", "price": 1.5, "count": 2}]},),
        ({"number": "1"},),
    )
    geo = closed(
        type={"const": "Point"},
        coordinates={"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 3},
    )
    yield (
        "geo point",
        geo,
        ({"type": "Point", "coordinates": [1, 2.5]},),
        ({"type": "Point", "coordinates": [1]},),
    )
    call = {
        "anyOf": [
            closed(name={"const": f"tool_{i}"}, arguments=closed(**{f"arg{i}": {"type": "string"}}))
            for i in range(5)
        ]
    }
    yield (
        "tool call",
        call,
        ({"name": "tool_3", "arguments": {"arg3": "x"}},),
        ({"name": "tool_3", "arguments": {}},),
    )
    event = closed(
        title={"type": "string"},
        start={"type": "string", "format": "date-time"},
        guests={"type": "array", "items": person},
        is_online={"type": "boolean"},
    )
    yield (
        "event",
        event,
        ({"title": "t", "start": "2024-01-02T03:04:05Z", "guests": [], "is_online": True},),
        ({},),
    )
    sentiment = closed(
        label={"enum": ["positive", "negative", "neutral"]},
        score={"type": "number", "minimum": 0, "maximum": 1},
    )
    yield "sentiment", sentiment, ({"label": "neutral", "score": 0.5},), ({"label": "good", "score": 0.5},)
    table = closed(
        columns={"type": "array", "items": {"type": "string"}},
        rows={"type": "array", "items": {"type": "array", "items": {"type": ["string", "number", "null"]}}},
    )
    yield (
        "table",
        table,
        ({"columns": ["a"], "rows": [["x"], [1], [None]]},),
        ({"columns": ["a"], "rows": [[True]]},),
    )
    recipe = closed(
        title={"type": "string"},
        minutes={"type": "integer", "minimum": 1, "maximum": 600},
        steps={"type": "array", "items": {"type": "string"}, "minItems": 1},
    )
    yield (
        "recipe",
        recipe,
        ({"title": "x", "minutes": 5, "steps": ["a"]},),
        ({"title": "x", "minutes": 0, "steps": ["a"]},),
    )
    config = {
        "type": "object",
        "properties": {
            "host": {"type": "string"},
            "port": {"type": "integer", "minimum": 1, "maximum": 65535},
            "tls": {"type": "boolean"},
            "paths": {"type": "object", "additionalProperties": {"type": "string"}},
        },
        "required": ["host"],
        "additionalProperties": False,
    }
    yield "config", config, ({"host": "x"}, {"host": "x", "port": 80, "paths": {"/": "y"}}), ({"port": 80},)
    quiz = closed(
        question={"type": "string"},
        options={"type": "array", "items": {"type": "string"}, "minItems": 4, "maxItems": 4},
        answer={"type": "integer", "minimum": 0, "maximum": 3},
    )
    yield (
        "quiz",
        quiz,
        ({"question": "?", "options": ["a", "b", "c", "d"], "answer": 3},),
        ({"question": "?"},),
    )
