"""The layouts of the field, as specs: each compiles, and each number in it is proved and can fail.

What the language has but this compiler does not yet is refused by name.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvgen.compile import Compiled, compile_spec
from kvgen.problems import Problem, Severity

LANGUAGE = Path(__file__).parent / "language"
FILES = sorted(LANGUAGE.glob("*.yaml"))
LAYOUTS = [path for path in FILES if "\nlayout:" in path.read_text(encoding="utf-8")]
CLAIMS = {  # what is said to be wrong, by the key of the number
    "bytes_per_token": "`bytes_per_token`",
    "host_bytes_per_token": "`host_bytes_per_token`",
    "request_bytes": "`request_bytes`",
    "page_total": "`page_total`",
    "total_bytes": "`total_bytes`",
    "byte": "`byte` of `{at}`",
    "bytes": "`bytes` of `{format}`",
    "page_bytes": "`page_bytes` of `{name}`",
    "slot_bytes": "`slot_bytes` of `{name}`",
    "slots": "`slots` of `{name}`",
    "owners": "`owners` of `{name}`",
    "reads": "`reads` of layer {layer} of `{name}`",
}


def compiled(text: str, file: str = "spec.yaml", folder: Path = LANGUAGE) -> Compiled:
    return compile_spec(file, lambda name: text.encode("utf-8") if name == file else (folder / name).read_bytes())


def expectations_of(path: Path) -> list[dict[str, Any]]:
    return yaml.safe_load(path.read_bytes())["expect"]


def errors(made: Compiled) -> list[Problem]:
    return [problem for problem in made.problems if problem.severity is Severity.ERROR]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_spec_compiles_and_proves_its_numbers(path: Path) -> None:
    made = compiled(path.read_text(encoding="utf-8"), path.name)
    assert errors(made) == []
    assert made.spec is not None
    assert len(made.spec.expectations) == len(expectations_of(path))
    if made.spec.kind == "fragment":
        assert made.module is None
    else:
        assert made.module is not None and made.namespace is not None
        assert made.namespace.Layout.__name__ in made.module.text


def test_families() -> None:
    """The layouts and fragments that the language was worked out against, but for what is not supported yet."""
    found = {path.stem for path in FILES}
    assert found >= {"mla_rows", "index_rows", "kv_rows", "dsv4_rows"}
    assert found >= {"gqa_orders", "gpt_oss", "minimax_m3", "dsv4", "qwen3_next", "kimi_linear", "corners"}
    assert found >= {"gemma3n", "dsv41"}
    assert sum(len(expectations_of(path)) for path in FILES) >= 60


# Every expectation can fail

NO_ERROR = "no error comes: the config and the choices are accepted"
OTHER_ERROR = "the error says something else"


def off_by_one(expectation: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """The expectation with one of its numbers one too high, and what must be said then; for each number."""
    found = []
    for key, value in expectation.items():
        if key not in CLAIMS or (key == "slots" and "format" in expectation):
            continue
        if key == "reads":
            for name, owners in value.items():
                for layer, owner in owners.items():
                    what = CLAIMS[key].format(name=name, layer=layer)
                    broken = {**expectation, key: {**value, name: {**owners, layer: owner + 1}}}
                    found.append((broken, f"{what} is {owner}, expected {owner + 1}"))
            continue
        for name, inner in value.items() if isinstance(value, dict) else [(None, value)]:
            if name in ("tokens", "requests"):
                continue
            changed = [*inner, 10_000] if isinstance(inner, list) else inner + 1
            what = CLAIMS[key].format(name=name, at=expectation.get("at"), format=expectation.get("format"))
            broken = {**expectation, key: changed if name is None else {**value, name: changed}}
            what = f"the number of {what}" if key == "owners" and isinstance(inner, int) else what
            found.append((broken, f"{what} is {written(inner)}, expected {written(changed)}"))
    return found


def written(value: list[int] | int) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def with_expectations(path: Path, expectations: list[dict[str, Any]]) -> str:
    """The spec with other expectations, one on each line."""
    head = path.read_text(encoding="utf-8").split("\nexpect:\n")[0]
    lines = [f"  - {yaml.safe_dump(item, default_flow_style=True, width=10**6).strip()}" for item in expectations]
    return "\n".join([head, "expect:", *lines]) + "\n"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_number_can_fail(path: Path) -> None:
    """One too many in any number of any expectation, and both numbers are told at that number."""
    expectations = expectations_of(path)
    broken = [item for expectation in expectations for item in off_by_one(expectation)]
    assert len(broken) >= sum("error" not in expectation for expectation in expectations)
    text = with_expectations(path, [expectation for expectation, _ in broken])
    made = compiled(text, path.name)
    problems = errors(made)
    assert [problem.code for problem in problems] == ["KV301"] * len(broken)
    first = text.count("\n", 0, text.index("\nexpect:\n")) + 3
    for line, (problem, (_, said)) in enumerate(zip(problems, broken, strict=True), start=first):
        assert problem.message == said
        span = problem.primary.span
        assert (span.line, problem.path) == (line, f"expect[{line - first}]")
        marked = text.split("\n")[line - 1][span.column - 1 : span.end_column - 1].strip("'")
        assert marked == said.partition(", expected ")[2]


@pytest.mark.parametrize("path", LAYOUTS, ids=lambda path: path.stem)
def test_every_expected_error_can_fail(path: Path) -> None:
    """Another error than the expected one, and no error where one is expected."""
    expectations = expectations_of(path)
    other = [{**item, "error": f"not {item['error']}"} for item in expectations if "error" in item]
    fine = [
        {"given": item["given"], "error": "nothing"} for item in expectations if "given" in item and "error" not in item
    ]
    made = compiled(with_expectations(path, [*other, *fine[:2]]), path.name)
    messages = [(problem.code, problem.message) for problem in errors(made)]
    assert messages == [("KV303", OTHER_ERROR)] * len(other) + [("KV303", NO_ERROR)] * len(fine[:2])


def test_a_wrong_number_tells_the_fields_that_make_the_difference() -> None:
    """GQA of 8 heads of 128 bf16 values: 4,096 bytes a layer. Half of it is the keys."""
    text = with_expectations(LANGUAGE / "gqa_orders.yaml", [{"given": GQA, "bytes_per_token": 2048}])
    (problem,) = errors(compiled(text, "gqa_orders.yaml"))
    assert problem.message == "`bytes_per_token` is 4096, expected 2048"
    assert problem.notes == (
        "`kv`: 4096 = 1 layer x 4096 bytes a slot (k 2048 + v 2048)",
        "the difference of 2048 is `kv.k`",
    )


GQA = {"num_layers": 1, "num_key_value_heads": 8, "head_dim": 128, "v_head_dim": 128}


# What is not there yet


SMALL = """\
kvgen: 1
layout: small
doc: A thing
config: {num_layers: {type: int, from: num_hidden_layers}}
layers: {body: num_layers}
spaces:
  token: {slots: tokens, page: 16}
formats:
  row: {fields: {k: "u8[4]"}, page: [[k]]}
buffers:
  kv: {format: row, space: token, layers: body}
  other: {format: row, space: token, layers: body}
"""
CONTRACT = """\
kvgen: 1
contract: some_kernel
doc: What a kernel reads
reads: {key: "e4m3[128]", key_scale: "f32[1]"}
require:
  - {that: page_slots == 64, else: the kernel reads pages of 64 slots}
"""


def refusals(text: str) -> list[tuple[str, str, str]]:
    """(code, message, what is marked) of each problem."""
    lines = text.split("\n")
    found = []
    for problem in errors(compiled(text)):
        span = problem.primary.span
        found.append((problem.code, problem.message, lines[span.line - 1][span.column - 1 : span.end_column - 1]))
    return found


@pytest.mark.parametrize(
    ("text", "message", "marked"),
    [
        (
            f"{SMALL}tensors: {{blocks: {{each: [page], put: [kv, other]}}}}\n",
            "`tensors` is not supported yet",
            "tensors",
        ),
        (
            f"{SMALL}tensors: {{blocks: {{each: [layer, page], put: [{{either: [[kv], [other]]}}, {{align: 8}}]}}}}\n",
            "`tensors` is not supported yet",
            "tensors",
        ),
        (
            SMALL.replace("layers: body}\n  other", "layers: body, serves: [a]}\n  other"),
            "`serves` is not supported yet",
            "serves",
        ),
        (CONTRACT, "contract files are not supported yet", "contract"),
        (
            CONTRACT.replace("doc:", "source: a project, file 3\ndoc:"),
            "contract files are not supported yet",
            "contract",
        ),
        (
            CONTRACT.replace("page_slots == 64,", '"stride(key, slot) == 128 and offset(key) == 0", fix: 4,'),
            "contract files are not supported yet",
            "contract",
        ),
    ],
    ids=["tensors", "either", "serves", "contract", "contract_source", "contract_facts"],
)
def test_not_supported_yet(text: str, message: str, marked: str) -> None:
    """Exactly this problem, at the key, and nothing else."""
    assert errors(compiled(SMALL)) == []
    assert refusals(text) == [("KV205", message, marked)]


def test_all_that_is_not_supported_at_once() -> None:
    text = SMALL.replace("layers: body}", "layers: body, serves: [a]}") + "tensors: {b: {each: [page], put: [kv]}}\n"
    assert sorted(refusals(text)) == sorted(
        [
            ("KV205", "`tensors` is not supported yet", "tensors"),
            ("KV205", "`serves` is not supported yet", "serves"),
            ("KV205", "`serves` is not supported yet", "serves"),
        ]
    )


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ("block_bytes: {blocks: 64}", "`block_bytes` is not supported yet"),
    ],
)
def test_claims_that_are_not_supported_yet(claim: str, message: str) -> None:
    text = f"{SMALL}expect:\n  - {{given: {{num_layers: 2}}, {claim}}}\n"
    assert refusals(text) == [("KV302", message, claim.partition(":")[0])]


def test_keys_of_reads_need_quotes() -> None:
    """A key is a text; a layer in `reads` is written in quotes."""
    text = f"{SMALL}expect:\n  - {{given: {{num_layers: 2}}, reads: {{kv: {{1: 0}}}}}}\n"
    (problem,) = errors(compiled(text))
    assert (problem.code, problem.message) == ("KV016", "key `1` is a number, not a text")
    assert problem.help == 'put quotes round it if a text is meant: `"1"`'
    span = problem.primary.span
    assert text.split("\n")[span.line - 1][span.column - 1 : span.end_column - 1] == "1"
