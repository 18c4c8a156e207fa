"""The schema is sound, admits the whole language, and every breach of it has words of its own."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from kvgen.nodes import format_path, plain
from kvgen.problems import Problem, render_concise, render_text
from kvgen.schema import CODES, check_schema, load_schema
from kvgen.source import read_source

PROBLEMS = Path(__file__).parent / "problems"
BAD = sorted(PROBLEMS.glob("KV1*.yaml"))

LAYOUT = """\
kvgen: 1
layout: every_key
doc: Every key that a layout may have, each form of it once.
license: Apache-2.0 OR MIT
include: [rows.yaml, more/rows.yaml]
config:
  num_layers: {type: int, from: num_hidden_layers, min: 1, max: 1000}
  head_dim: {type: int, from: [head_dim, hidden_size / num_attention_heads]}
  latent_dim: {type: int, is: 512}
  kinds: {type: list, of: {sliding_attention: sliding, full_attention: full}, besides: text, optional: true}
  sources: {type: list, of: int, default: [0, 4]}
  ratios: {type: list, of: [0, 4, 128]}
  pattern: {type: text, of: FS, default: FFS}
  state_dtype: {of: {float32: f32, bfloat16: bf16}, default: f32}
ignores:
  v_head_dim: no part of a row
choices:
  kv_format: {of: [bf16, fp8], default: bf16, for_requests: fp8}
  swa_ratio: {type: ratio, min: 0, max: 1/2, default: 0.1}
  elide: {type: bool, default: true}
let:
  heads: kinds[layer] if has(kinds) else 4
  wide: true
  half: 0.5
  two: 2
require:
  - {that: num_layers > 1, else: one layer is too few}
notes:
  - {when: elide and layer > 0, say: all of them are kept}
layers:
  body: num_layers
  draft: 1
  sets:
    sliding:
      - {when: has(kinds), use: "kinds[layer] == 'sliding'"}
      - {use: false}
    owns: layer % 2 == 0
spaces:
  token: {slots: tokens, page: 16, reserve: 2}
  request: {slots: requests * 2, at_most: tokens, page: 2}
  quarter: {of: token, slot: offset // 4, where: offset % 2 == 0}
  device:
    - {when: elide, use: {of: token, slots: tokens / 2, page: 16}}
    - {use: {of: token, slot: offset}}
formats:
  rows:
    fields:
      k: {type: "e4m3[heads, head_dim]", quant: {scale: k_scale, outer: given, floor: 1e-4, round: pow2, code: divide}}
      k_scale: "f32[heads, head_dim//32]"
      state: {type: "state_dtype[2]", init: -inf}
      count: {type: "i32[1]", init: 0}
    page:
      - [k, {pad: 4}, "k_scale[head_dim//32, heads]"]
      - {align: 128}
      - {each: [slot//16, heads, slot%16], put: [state, count, {align: two}]}
  same:
    fields: rows
    page: [[k], [k_scale], [state], [count]]
  row:
    - {when: kv_format == 'bf16', use: rows}
    - {use: same}
buffers:
  kv: {format: row, space: token, layers: owns, readers: all, block: 4, align: 576, split: elide, memory: host}
  state: {format: rows, space: request, layers: true, split: false, memory: device, serves: [some_kernel]}
tensors:
  blocks: {each: [layer, page], put: [kv, {pad: 2}, {align: two}, {either: [[kv], [state, {align: 4}]]}]}
operations:
  store_kv: {store: [kv], args: {cache_k: k}}
  get_kv: {load: [kv], returns: [k]}
  view_kv: {view: [kv], as: rows, at: own}
  put_kv: {put: [kv], args: {cache_k: k, cache_k_scale: k_scale}}
  read_kv: {get: [kv]}
  gather_kv: {gather: [kv]}
  move_all: {move: all}
  save_all: {save: all}
  load_all: {restore: all}
  infos: {describe: [kv, state]}
expect:
  - {config: configs/some.json, given: {kv_format: fp8, sources: [1, 2], elide: false}, bytes_per_token: 1025/2}
  - {bytes_per_token: 512.5, host_bytes_per_token: 0, request_bytes: 64, page_total: 1024, notes: [kept]}
  - {total_bytes: {tokens: 64, requests: 2, is: 4096}, page_bytes: {kv: 64}, slot_bytes: {kv: 4}}
  - {block_bytes: {blocks: 128}, slots: {tokens: 64, kv: 80}, owners: {kv: [0, 2], state: 3}, reads: {kv: {"1": 0}}}
  - {at: kv.k, layer: 0, slot: 3, index: [1, 2], byte: 77}
  - {given: {num_layers: 1}, error: too few}
"""
FRAGMENT = """\
kvgen: 1
fragment: rows
doc: Every key that a fragment may have.
needs: {head_dim: int, kv_format: [bf16, fp8]}
let: {half: head_dim // 2}
formats:
  bf16_rows: {fields: {k: "bf16[half]"}, page: [[k]]}
expect:
  - {given: {head_dim: 128}, format: bf16_rows, slots: 16, bytes: 2048}
"""
CONTRACT = """\
kvgen: 1
contract: some_kernel
doc: Every key that a contract may have.
source: some project 54e2261, attention.cu:306
reads: {key: "e4m3[128]", key_scale: "f32[1]"}
require:
  - {that: page_slots == 64, else: the kernel reads pages of 64 slots}
  - {that: page_stride % 4 == 0, else: pages must be 4 bytes apart, fix: 4}
"""
GOOD = {"layout": LAYOUT, "fragment": FRAGMENT, "contract": CONTRACT}
SMALL = """\
kvgen: 1
layout: small
doc: One buffer.
layers: {body: 2}
spaces: {token: {slots: tokens, page: 16}}
formats: {row: {fields: {k: "bf16[64]"}, page: [[k]]}}
buffers: {kv: {format: row, space: token, layers: body}}
"""


def check(text: str, file: str = "spec.yaml") -> list[Problem]:
    """What the schema pass says about a text that is well-formed."""
    source, problems = read_source(file, text.encode())
    assert source is not None, render_concise(problems)
    return check_schema(source)


def subschemas(schema: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema within a schema, with its place."""
    if isinstance(schema, list):
        for index, item in enumerate(schema):
            yield from subschemas(item, (*path, index))
    if isinstance(schema, dict):
        yield format_path(path), schema
        for key, value in schema.items():
            maps_names = key in ("properties", "$defs")
            for step, inner in value.items() if maps_names else [(None, value)]:
                yield from subschemas(inner, (*path, key) if step is None else (*path, key, step))


def test_schema_is_valid_json_schema() -> None:
    Draft202012Validator.check_schema(load_schema())


def test_every_mapping_is_closed_or_has_names_for_keys() -> None:
    for path, schema in subschemas(load_schema()):
        is_guard = path.endswith(".if")
        if "properties" in schema or (schema.get("type") == "object" and "if" not in schema and not is_guard):
            rest = schema.get("additionalProperties")
            assert rest is False or (isinstance(rest, dict) and "propertyNames" in schema), path


def test_every_key_and_definition_is_described() -> None:
    schema = load_schema()
    described = list(schema["$defs"].items())
    for _, inner in subschemas(schema):
        described += inner.get("properties", {}).items()
    for path, definition in described:
        description = definition.get("description", "")
        assert description[:1].isupper() or description[:1] == "`", path
        assert description.endswith("."), path


def test_every_definition_is_used() -> None:
    schema = load_schema()
    used = {inner["$ref"].removeprefix("#/$defs/") for _, inner in subschemas(schema) if "$ref" in inner}
    assert used == set(schema["$defs"])


def test_every_pattern_has_words_and_is_anchored() -> None:
    for path, schema in subschemas(load_schema()):
        if "pattern" in schema:
            assert schema["title"] and schema["description"], path
            assert schema["pattern"].startswith("^") and schema["pattern"].endswith("$"), path


@pytest.mark.parametrize("kind", GOOD)
def test_every_key_of_the_language_passes(kind: str) -> None:
    assert render_concise(check(GOOD[kind])) == ""


def test_examples_use_every_key() -> None:
    known = {key for _, schema in subschemas(load_schema()) for key in schema.get("properties", {})}
    assert known - {key for text in GOOD.values() for key in keys_of(plain(source_of(text).root))} == set()


def source_of(text: str) -> Any:
    source, _ = read_source("spec.yaml", text.encode())
    return source


def keys_of(value: object) -> Iterator[str]:
    """Every key in a value."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from keys_of(item)


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_bad_spec_gets_the_expected_message(path: Path) -> None:
    problems = check(path.read_text(encoding="utf-8"), path.name)
    shown = render_text(problems, {path.name: path.read_text(encoding="utf-8")})
    assert shown == path.with_suffix(".txt").read_text(encoding="utf-8")
    assert path.name.partition("_")[0] in {problem.code for problem in problems}


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_schema_as_editors_use_it_refuses_bad_specs(path: Path) -> None:
    data = plain(source_of(path.read_text(encoding="utf-8")).root)
    in_python_only = {"KV106_name_with_line_feed"}  # `$` in Python's patterns
    assert Draft202012Validator(load_schema()).is_valid(data) == (path.stem in in_python_only)


@pytest.mark.parametrize("kind", GOOD)
def test_schema_as_editors_use_it_admits_the_language(kind: str) -> None:
    assert list(Draft202012Validator(load_schema()).iter_errors(plain(source_of(GOOD[kind]).root))) == []


def test_every_code_has_a_bad_spec() -> None:
    assert {path.name.partition("_")[0] for path in BAD} == set(CODES)
    assert all(path.with_suffix(".txt").exists() for path in BAD)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("layout: small", "layout: small\nlayot: big", "spec.yaml:3:1: error[KV102]: unknown key `layot`"),
        ("body: 2", "body: []", "spec.yaml:4:16: error[KV104]: `body`: expected text or an integer, found a list"),
        ("body: 2", "body: true", "spec.yaml:4:16: error[KV104]: `body`: expected text or an integer, found a boolean"),
        ("kvgen: 1", 'kvgen: "1"', "spec.yaml:1:8: error[KV104]: `kvgen`: expected an integer, found text"),
        ("layout: small", "layout: null", "spec.yaml:2:9: error[KV104]: `layout`: expected text, found null"),
        ("page: [[k]]", "page: [[[k]]]", "found a list"),
        ("page: [[k]]", "page: [[{}]]", "spec.yaml:6:50: error[KV103]: missing key: one of `pad`, `align`"),
        ("doc: One buffer.", 'doc: "One\\u200bbuffer."', "`One\\u200bbuffer.` is not one line of printable text"),
    ],
)
def test_message(old: str, new: str, expected: str) -> None:
    (line,) = render_concise(check(SMALL.replace(old, new))).splitlines()
    assert expected in line


def test_nothing_else_is_said_of_another_version() -> None:
    (problem,) = check("kvgen: 7\nlayout: Of_The_Future\nstars: 3\n")
    assert problem.code == "KV114"


def test_many_problems_of_a_kind_are_counted() -> None:
    problems = check(SMALL + "".join(f"extra_{number}: 1\n" for number in range(50)))
    assert [problem.code for problem in problems] == ["KV102"] * 20
    assert problems[-1].notes[-1] == "30 more of this kind in this file"


def test_paths_name_the_place_in_the_spec() -> None:
    problems = check(SMALL.replace("[[k]]", "[[k, {pad: x, align: 2}], {each: [slot], putt: [k]}]"))
    assert [(problem.code, problem.path) for problem in problems] == [
        ("KV112", "formats.row.page[0][1].align"),
        ("KV102", "formats.row.page[1].putt"),
    ]


def replaced(value: Any, rng: random.Random) -> Any:
    """A copy of a spec's data with one part of it replaced, dropped or renamed."""
    junk = [None, True, 0, -1, "", "x", "Not A Name", [], {}, [[]], {"x": 1}, ["x", "x"], "a" * 200]
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.15:
        return rng.choice(junk)
    if isinstance(value, list):
        index = rng.randrange(len(value))
        return [replaced(item, rng) if index == position else item for position, item in enumerate(value)]
    chosen = rng.choice(list(value))
    match rng.randrange(8):
        case 0:
            return {key: item for key, item in value.items() if key != chosen}
        case 1:
            return {key + "x" if key == chosen else key: item for key, item in value.items()}
        case 2:
            return value | {rng.choice(["of", "slot", "each", "put", "when", "at", "colour"]): rng.choice(junk)}
    return {key: replaced(item, rng) if key == chosen else item for key, item in value.items()}


@pytest.mark.parametrize("seed", range(3))
def test_random_breaches_are_messages(seed: int) -> None:
    """Whatever is wrong, and only then, there is a message, at a place in the file."""
    rng = random.Random(seed)
    validator = Draft202012Validator(load_schema())
    for _ in range(100):
        data = json.loads(json.dumps(plain(source_of(rng.choice(list(GOOD.values()))).root), default=float))
        for _ in range(rng.randrange(1, 4)):
            data = replaced(data, rng)
        text = json.dumps(data, indent=1)
        source, _ = read_source("spec.yaml", text.encode())
        if source is None:
            continue
        problems = check_schema(source)
        assert bool(problems) != validator.is_valid(plain(source.root)), text
        for problem in problems:
            assert problem.code in CODES
            assert 1 <= problem.primary.span.line <= len(text.splitlines())
        render_text(problems, {"spec.yaml": text})


def test_importing_the_pass_does_not_import_jsonschema() -> None:
    program = "import sys, kvgen.schema; print('jsonschema' in sys.modules)"
    root = str(Path(__file__).parent.parent)
    assert subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True).stdout == "False\n"
