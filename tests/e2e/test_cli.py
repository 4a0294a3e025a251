"""The command line as a user runs it: in a process of its own."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from helpers.command_line import assert_one_line_error, foreword, refusal


def test_generate_streams_text_and_json_says_the_same(tiny_model: Path):
    options = ["the sky", "--model", str(tiny_model), "--temperature", "0", "--max-tokens", "12"]
    streamed = foreword("generate", *options)
    assert streamed.returncode == 0, streamed.stderr
    as_json = foreword("generate", *options, "--json", "--seed", "4", "--dtype", "float32")
    answer = json.loads(as_json.stdout)
    assert answer["text"] == streamed.stdout.removesuffix("\n")
    assert answer["seed"] == 4
    assert answer["finish_reason"] in {"stop", "length"}
    assert answer["timings"]["predicted_n"] == len(answer["token_ids"])


def test_the_footer_tells_passes_acceptance_and_what_was_drawn_with(tiny_model: Path, tmp_path: Path):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "generation_config.json").write_text('{"temperature": 0.5, "top_p": 0.8}', encoding="utf-8")
    options = [
        "the the the",
        "--model",
        str(model),
        "--max-tokens",
        "40",
        "--seed",
        "5",
        "--temperature",
        "0",
    ]
    config = ["--speculative-config", '{"method": "ngram", "prompt_lookup_min": 1, "fixed": true}']
    run = foreword("generate", *options, *config)
    cost, drawn = run.stderr.splitlines()
    assert re.fullmatch(
        r"40 tokens, \d+\.\d\d per pass \(39 in \d+ after the prompt's\), "
        r"\d+ of \d+ draft tokens accepted, \S+ tokens/s, "
        r"0 of \d+ prompt tokens cached",
        cost,
    )
    assert drawn == "seed 5", "greedy decoding reads no top_p"
    plain = foreword("generate", *options, "--speculation", "off", "--generation-config", "none")
    cost, drawn = plain.stderr.splitlines()
    assert cost.startswith("40 tokens, 1.00 per pass (39 in 39 after the prompt's), ")
    assert drawn == "seed 5"
    assert plain.stdout == run.stdout


def test_a_predicted_answer_takes_few_passes(tiny_model: Path, tmp_path: Path):
    options = [
        "generate",
        "the sky",
        "--model",
        str(tiny_model),
        "--seed",
        "5",
        "--max-tokens",
        "40",
        "--json",
    ]
    plain = json.loads(foreword(*options, "--speculation", "off").stdout)
    (tmp_path / "expected.txt").write_text(plain["text"], encoding="utf-8")
    always = json.dumps({"method": "prediction", "fixed": True})  # not only where it pays
    run = foreword(*options, "--speculation", always, "--prediction", str(tmp_path / "expected.txt"))
    predicted = json.loads(run.stdout)
    assert predicted["text"] == plain["text"]
    assert predicted["timings"]["draft_n_accepted"] > 8  # read again, such a text may have other tokens
    missing = str(tmp_path / "none.txt")
    assert_one_line_error(foreword(*options, "--prediction", missing), missing, "No such file")


def test_the_prompt_comes_from_an_argument_a_file_or_a_pipe(tiny_model: Path, tmp_path: Path):
    options = ["--model", str(tiny_model), "--temperature", "0", "--max-tokens", "8"]
    expected = foreword("generate", "the sky", *options).stdout
    (tmp_path / "prompt.txt").write_text("the sky\n", encoding="utf-8")
    assert foreword("generate", *options, stdin="the sky\n").stdout == expected
    assert foreword("generate", "-", *options, stdin="the sky").stdout == expected
    assert foreword("generate", "--file", str(tmp_path / "prompt.txt"), *options).stdout == expected
    assert foreword("generate", "the sky", "--system", "Be brief.", *options).stdout != expected
    both = foreword("generate", "one\n\nthe sky", *options).stdout
    assert foreword("generate", "the sky", *options, stdin="one\n").stdout == both != expected


def test_help_completion_and_paths_as_people_expect_them(tmp_path: Path):
    for arguments in (["-h"], ["generate", "-h"], ["bench", "step", "-h"]):
        assert "--help" in foreword(*arguments).stdout
    # Otherwise the shell is that of the process above, which is make's under `make test`.
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    assert "complete" in foreword("--show-completion", "bash", env=named).stdout
    listed = foreword("models", env={"FOREWORD_CACHE": str(tmp_path / ("long" * 40)), "COLUMNS": "40"})
    assert str(tmp_path / ("long" * 40)) in listed.stdout
    assert {line.count("\t") for line in listed.stdout.splitlines()} == {4}


def test_help_is_readable_on_80_columns_and_shown_where_nothing_is_asked():
    told = foreword("generate", "--help", env={"COLUMNS": "80"}).stdout
    assert "  --repetition-penalty <float>    Penalty on repeated tokens, such as 1.1; 1:\n" in told
    assert max(map(len, told.splitlines())) <= 80
    for arguments in ([], ["bench"]):
        run = foreword(*arguments)
        assert (run.returncode, run.stdout) == (2, "")
        assert "Commands:" in run.stderr


def test_bench_quality_brings_a_text_of_its_own(tiny_model: Path):
    options = ["--tokens", "64", "--forms", "q8_0, q8_0+float32-kv", "--device", "auto", "--json"]
    run = foreword("bench", "quality", "--model", str(tiny_model), *options)
    assert run.returncode == 0, run.stderr
    assert [row["tokens"] for row in json.loads(run.stdout)["rows"]] == [64, 64]


@pytest.mark.parametrize("content", [b'{"a": 1}\n{oops\n', b"\xff\xfe", b"[" * 100_000])
def test_bench_quality_refuses_a_file_that_is_not_text(tmp_path: Path, content: bytes):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(content)
    assert_one_line_error(refusal("bench", "quality", "--text", str(path)), str(path), "cannot be read")


def test_doctor_says_whether_guessing_is_on_and_why():
    assert "instruction set" in foreword("doctor").stdout
    found = json.loads(foreword("doctor", "--json").stdout)
    assert (found["speculation"] in ("suffix", "eagle3+ngram")) == (found["backend"] != "torch")
    assert found["speculation_because"]
    assert found["instruction_set_because"]


def test_doctor_says_what_cannot_be_known_before_the_model_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FOREWORD_CACHE", str(tmp_path))
    found = json.loads(foreword("doctor", "--json").stdout)
    assert "`foreword pull smollm2-135m`" in found["speculation_because"]


def test_supported_families_are_listed():
    rows = json.loads(foreword("models", "--supported", "--json").stdout)["families"]
    deepseek = next(row for row in rows if row["hf_class"] == "DeepseekV2ForCausalLM")
    assert deepseek["formats"] == "safetensors, GGUF (deepseek2)"
    assert deepseek["backends"] == {"cpu": "yes", "cuda": "yes", "torch": "yes"}


def test_bench_step_prints_one_json_line(tiny_model: Path):
    run = foreword(
        "bench",
        "step",
        "--model",
        str(tiny_model),
        "--tokens",
        "1,3",
        "--context",
        "40",
        "--repeats",
        "2",
        "--prefill",
        "16,40",
        "--json",
    )
    assert run.returncode == 0, run.stderr
    printed = json.loads(run.stdout)
    assert [prompt["n"] for prompt in printed["prefill"]] == [16, 40]
    assert "prompt of 40" in run.stderr
    rows = printed["rows"]
    assert [row["n"] for row in rows] == [1, 3]
    assert rows[0]["ratio"] == 1.0
    assert all(row["ms"] > 0 for row in rows)


def test_bench_step_times_a_mixture_against_a_dense_model(tiny_model: Path):
    options = ["--model", str(tiny_model), "--tokens", "1,4", "--context", "8", "--repeats", "1", "--json"]
    run = foreword("bench", "step", "--experts", "8", *options)
    assert run.returncode == 0, run.stderr
    printed = json.loads(run.stdout)
    for costs in (printed["rows"], printed["compare"]["dense"]["steps"]):
        assert [row["n"] for row in costs] == [1, 4]
        assert all(row["ms"] > 0 for row in costs)


def test_bench_step_measures_numbers_of_threads(tiny_model: Path):
    options = [
        "--model",
        str(tiny_model),
        "--device",
        "cpu",
        "--tokens",
        "1,4",
        "--context",
        "8",
        "--repeats",
        "1",
    ]
    options.append("--json")
    run = foreword("bench", "step", "--threads", "1,2,3", *options)
    assert run.returncode == 0, run.stderr
    assert "context 8, 1 thread" in run.stderr
    printed = json.loads(run.stdout)
    assert list(printed["compare"]) == ["2 threads", "3 threads"]
    for costs in (printed["rows"], *(engine["steps"] for engine in printed["compare"].values())):
        assert [row["n"] for row in costs] == [1, 4]
    for wrong, words in (("1,x", "numbers"), ("0", "at least 1"), ("99999", "at most")):
        run = foreword("bench", "step", "--threads", wrong, *options)
        assert (run.returncode, run.stdout) == (2, "")
        assert words in run.stderr


def test_bench_accept_prints_one_json_line(tiny_model: Path):
    options = ["--model", str(tiny_model), "--requests", "1,3", "--repeats", "2", "--rule", "block", "--json"]
    run = foreword("bench", "accept", *options)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert [row["requests"] for row in found["rows"]] == [1, 3]
    assert all(row["ratio"] > 0 for row in found["rows"])
    assert found["verify_ms"] > 0


@pytest.mark.slow
def test_prove_holds_and_prints_one_json_line():
    run = foreword("prove", "--json")
    assert run.returncode == 0, run.stdout
    found = json.loads(run.stdout)
    assert found["passed"]
    assert {"coupled", "token", "block", "traversal", "noise"} == {row["rule"] for row in found["rows"]}


def test_help_and_version_answer_without_loading_torch():
    for arguments in (["--help"], ["generate", "--help"], ["--version"]):
        run = foreword(*arguments, env={"PYTHONPROFILEIMPORTTIME": "1"})
        assert run.returncode == 0
        assert "| torch" not in run.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "hi", "--model", "no/such/path.gguf"], ["no/such/path.gguf"]),
        (["generate", "hi", "--model", "nosuchmodel"], ["nosuchmodel", "smollm2-135m"]),
        (["generate", "hi", "--model", "~no-such-user/model"], ["~no-such-user/model"]),
        (["policy", "check", "~no-such-user/policy"], ["~no-such-user/policy"]),
        (["generate", "hi", "--temperature", "-1"], ["temperature"]),
        (["generate", "hi", "--temperature", "hot"], ["--temperature must be a number (see "]),
        (["serve", "--port", "99999"], ["--port must be at most 65535"]),
        (["serv"], ["Did you mean 'serve'? (see "]),
        (["cli", "smollm2-135m"], ["No such command 'cli'. Did you mean 'chat' or 'generate'? (see "]),
        (["run"], ["Missing argument"]),
        (["chat", "--temperature", "3"], ["temperature must be in 0 .. 2, not 3"]),
        (["chat", "--seed", "-1"], ["seed must be in 0"]),
        (["chat", "--top-p", "2"], ["top_p must be"]),
        (["generate", "hi", "--max-tokens", "0"], ["max_tokens"]),
        (["generate", "hi", "--top-p", "0"], ["top_p"]),
        (["bench", "accept", "--rule", "typical"], ["typical", "coupled"]),
        (["bench", "pools"], ["--draft", "--shape"]),
        (["bench", "pools", "--shape", "llama-1b", "--draft", "x"], ["--shape", "leave out"]),
        (["generate", "hi", "--file", "x"], ["give one"]),
        (["generate", "hi", "--file", "no/such/file"], ["give one"]),
        (["generate", "--file", "no/such/file"], ["no/such/file", "No such file"]),
        (["generate", "--file", os.devnull], ["empty"]),
        (["generate", ""], ["empty"]),
        (["generate", "hi", "--raw", "--system", "x"], ["--system"]),
        (["generate", "hi", "--speculation", "on"], ["no method 'on'", "ngram", "auto and off"]),
        (["serve", "--speculation", "off", "--speculative-config", "{}"], ["give one"]),
        (["serve", "--lora-modules", "a=/", "b=/nowhere"], ["--lora-modules: /nowhere is not a directory"]),
        (["chat", "--generation-config", "vllm"], ["auto or none"]),
        (["pull", "nosuchmodel"], ["nosuchmodel"]),
        (["pull", "--model", "smollm2-135m"], ["--model", "foreword pull MODEL"]),
        (["run", "-m", "smollm2-135m"], ["-m", "foreword run MODEL"]),
        (["chat", "smollm2-135m"], ["smollm2-135m", "give a model with --model"]),
        (["bench", "step", "--tokens", "1,x"], ["--tokens"]),
        (["prove", "--small"], ["--small", "add --url"]),
        (["prove", "--seed", "1"], ["--seed", "add --url"]),
        (["prove", "--minutes", "0"], ["--minutes", "add --url"]),
        (["prove", "--route", "chat"], ["--route", "add --url"]),
        (["prove", "--tolerance", "0.1"], ["--tolerance", "add --url"]),
        (["bench", "drafters", "--page", "x", "--repeats", "3"], ["--repeats", "--page", "leave one out"]),
        (["bench", "drafters", "--concurrency", "2", "--history"], ["--history", "--concurrency"]),
        (["bench", "drafters", "--temperatures", "0", "--temperature", "1"], ["--temperature "]),
        (["bench", "drafters", "--page", os.path.curdir], ["--page .", "it is a directory"]),
        (["bench", "drafters", "--page", "no/such/x.html"], ["--page", "no directory no/such"]),
        (["bench", "scoreboard", "--measure", "--out", os.path.curdir], ["--out .", "it is a directory"]),
        (["simulate", "--page", os.path.curdir], ["--page .", "it is a directory"]),
        (["tune", "--out", os.path.curdir], ["--out .", "it is a directory"]),
        (["bench", "drafters", "--cost-per-hour", "2"], ["--cost-per-hour", "--page"]),
        (["bench", "scoreboard", "--peers", "vllm"], ["--peers", "add --measure"]),
        (["bench", "scoreboard", "--measure", "--out", "no/such/x.md"], ["--out", "no directory no/such"]),
        (["bench", "step", "--shape", "llama-1b", "--compare", "llama.cpp"], ["--compare", "--shape"]),
        (["bench", "step", "--experts", "4", "--compare", "llama.cpp"], ["--compare", "--experts"]),
        (["bench", "step", "--shape", "llama-1b", "--kv-cache-dtype", "fp8"], ["--kv-cache-dtype"]),
        (["bench", "quality", "--tokens", "0"], ["--tokens must be at least 1"]),
        (["bench", "quality", "--text", "no/such.jsonl"], ["no/such.jsonl", "No such file"]),
        (["top", "--url", "http://127.0.0.1:x"], ["http://127.0.0.1:x", "nonnumeric port"]),
        (["bench", "step", "--prefill", "many"], ["--prefill"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], words: list[str]):
    assert_one_line_error(refusal(*arguments), *words)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["generate"], "standard input is empty"),
        (["run", "smollm2-135m"], "the prompt is empty"),
        (["policy", "tenant"], "there is no API key"),
    ],
)
def test_a_closed_standard_input_is_an_empty_one(monkeypatch, arguments: list[str], reason: str):
    monkeypatch.setattr("sys.stdin", None)
    assert_one_line_error(refusal(*arguments), reason)


def test_bad_input_for_a_loaded_model_is_one_line_too(tiny_model: Path):
    model = ["--model", str(tiny_model)]
    assert_one_line_error(foreword("generate", "word " * 600, *model), "context")
    assert_one_line_error(refusal("generate", "hi", *model, "--dtype", "int3"), "int3", "float32")
    assert_one_line_error(refusal("generate", "hi", *model, "--device", "tpu"), "tpu")
    assert_one_line_error(foreword("bench", "step", *model, "--context", "9999"), "context")


def test_damaged_model_files_are_one_line_errors(tiny_model: Path, tmp_path: Path):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert_one_line_error(refusal("generate", "hi", "--model", str(broken)), str(broken))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\xff" * 60)
    assert_one_line_error(refusal("generate", "hi", "--model", str(tmp_path / "bad.gguf")), "bad.gguf")


def test_no_network_at_first_run_is_one_line_and_leaves_nothing(tmp_path: Path):
    offline = {
        "FOREWORD_CACHE": str(tmp_path),
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": "",
        "PIP_RETRIES": "0",
        "PIP_NO_CACHE_DIR": "1",
    }
    run = foreword("generate", "hi", env=offline)
    assert_one_line_error(run, "network", "path of a model")
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"] == []


@pytest.mark.model
def test_models_lists_the_built_in(default_model: Path):
    listed = json.loads(foreword("models", "--json").stdout)["models"]
    assert listed[0]["name"] == "smollm2-135m"
    assert Path(listed[0]["path"]) == default_model
    assert listed[0]["present"]
    assert "smollm2-135m" in foreword("models").stdout


def test_generate_stops_before_a_text_and_gives_several_answers(tiny_model: Path):
    model = ["--model", str(tiny_model), "--json", "--seed", "3", "--max-tokens", "12"]
    whole = json.loads(foreword("generate", "hi", *model).stdout)["text"]
    stop = whole[3:5]
    cut = json.loads(foreword("generate", "hi", *model, "--stop", stop).stdout)
    assert cut["text"] == whole[: whole.index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    several = json.loads(foreword("generate", "hi", *model, "-n", "2").stdout)
    assert several["text"] == several["outputs"][0]["text"] == whole
    assert several["outputs"][1]["index"] == 1


def test_bench_batch_prints_a_table_and_json(tiny_model: Path):
    run = foreword(
        "bench", "batch", "--model", str(tiny_model), "--batches", "1,2", "--tokens", "4", "--json"
    )
    assert run.returncode == 0, run.stderr
    assert [row["batch"] for row in json.loads(run.stdout)["rows"]] == [1, 2]
