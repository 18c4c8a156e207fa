"""The reference of the language says what the code does: each key, code, spec, extract and command on the page."""

import importlib
import io
import json
import pkgutil
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import kvgen
from kvgen import cases, check, expr, placing, scalars, source, spec, types
from kvgen.cli import main
from kvgen.schema import load_schema
from kvgen.source import read_source

PAGE = (Path(__file__).parent.parent / "docs" / "spec-language.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SECTION = re.compile(r"^[a-z]+:.*\n(?:[ #].*\n|\n)*", re.MULTILINE)


# The page


@dataclass(frozen=True)
class Block:
    """A fenced block. `name` is the file that the line in front of it calls it, if it does."""

    kind: str
    text: str
    name: str | None
    line: int


def blocks(kind: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(PAGE):
        before = PAGE[: match.start()].rstrip("\n").rsplit("\n", 1)[-1]
        name = re.search(r"`(\w+\.\w+)`:$", before)
        found.append(Block(match[1], match[2], name and name[1], PAGE.count("\n", 0, match.start()) + 1))
    return [block for block in found if block.kind == kind]


FILES = [block for kind in ("yaml", "json") for block in blocks(kind) if block.name]
EXTRACTS = [block for block in blocks("yaml") if not block.name]
SMALLEST = next(block.text for block in FILES if block.name == "smallest.yaml")


@dataclass(frozen=True)
class Row:
    """A line of a table that lists keys: what its first cell names, and its cells."""

    keys: tuple[str, ...]
    cells: tuple[str, ...]


def tables() -> Iterator[tuple[list[str], list[Row]]]:
    """The definitions of the schema that each marked table is about, and its lines."""
    for match in re.finditer(r"^<!-- schema: (.*) -->\n\|.*\|\n\|[-|]*\|\n((?:\|.*\|\n)*)", PAGE, re.MULTILINE):
        rows = []
        for line in match[2].splitlines():
            cells = tuple(cell.strip() for cell in line.strip("|").split("|"))
            rows.append(Row(tuple(re.findall(r"`(\w+)`", cells[0])), cells))
        yield match[1].split(", "), rows


def section(title: str) -> str:
    """The text of a section, up to the next of the same level."""
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the page, where commands run."""
    monkeypatch.chdir(tmp_path)
    for block in FILES:
        (tmp_path / block.name).write_text(block.text, encoding="utf-8")
    return tmp_path


def run(*words: str) -> tuple[int, str]:
    """The exit status of a command, and what it prints."""
    stdout, stderr = io.StringIO(), io.StringIO()
    status = main(list(words), io.BytesIO(), stdout, stderr)
    return status, stdout.getvalue() + stderr.getvalue()


def whole(extract: str) -> str:
    """`smallest.yaml` with the sections of an extract in place of its own."""
    sections = {match[0].split(":")[0]: match[0] for match in SECTION.finditer(SMALLEST)}
    sections |= {match[0].split(":")[0]: match[0] for match in SECTION.finditer(extract)}
    return "".join(sections.values())


# Specs and commands


def test_files_have_names_of_their_own() -> None:
    names = [block.name for block in FILES]
    assert len(set(names)) == len(names) >= 4
    for block in blocks("yaml"):
        assert ("kvgen: 1\n" in block.text) == (block.name is not None), block.line
    assert all(block.name for block in blocks("json"))


@pytest.mark.parametrize("name", [block.name for block in FILES if block.kind == "yaml"])
def test_files_compile(name: str, folder: Path) -> None:
    assert run("check", name) == (0, "")


@pytest.mark.parametrize("extract", EXTRACTS, ids=lambda block: f"line {block.line}")
def test_extracts_become_whole_layouts(extract: Block, folder: Path) -> None:
    sections = [match[0] for match in SECTION.finditer(extract.text)]
    assert "".join(sections) == extract.text  # nothing is left out
    Path("whole.yaml").write_text(whole(extract.text))
    assert run("check", "whole.yaml") == (0, "")


def test_commands_print_what_is_shown(folder: Path) -> None:
    shown = [block.text for block in blocks("console")]
    assert shown
    for text in shown:
        commands = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)
        assert "".join(f"$ {command}\n{output}" for command, output in commands) == text
        for command, output in commands:
            program, *words = shlex.split(command)
            assert program == "kvgen"
            assert run(*words)[1] == output


def test_numbers_of_the_first_example() -> None:
    """A layer has 2 x 8 x 128 bf16 values, one of four a key of 128 bytes and a scale of 4; 16 slots are reserved."""
    per_token = 32 * 2 * 8 * 128 * 2 + 32 // 4 * (128 + 4)
    tokens = (40 * 2**30 - 16 * per_token) // (16 * per_token) * 16
    output = blocks("console")[0].text
    for number in (per_token, 16 * per_token, tokens, tokens + 16, (tokens + 16) * per_token):
        assert f" {number:,}" in output


# Keys


def properties(definition: dict[str, Any]) -> dict[str, Any]:
    return definition.get("properties", {})


def values(schema: dict[str, Any], definitions: dict[str, Any]) -> Iterator[Any]:
    """The values that are spelt out for one key: of `enum` and `const`, through references, not below other keys."""
    yield from schema.get("enum", ())
    if "const" in schema:
        yield schema["const"]
    inner = [schema[key] for key in ("then", "else") if key in schema]
    if "$ref" in schema:
        inner.append(definitions[schema["$ref"].removeprefix("#/$defs/")])
    for each in inner:
        if not properties(each):
            yield from values(each, definitions)


def written(value: Any) -> str:
    return f"`[{', '.join(value)}]`" if isinstance(value, list) else f"`{value}`"


def test_every_key_of_the_schema_is_in_a_table_and_nothing_else() -> None:
    definitions = load_schema()["$defs"]
    listed = [name for names, _ in tables() for name in names]
    assert sorted(listed) == sorted(name for name, item in definitions.items() if properties(item))
    for names, rows in tables():
        keys = [key for row in rows for key in row.keys]
        assert set(keys) == {key for name in names for key in properties(definitions[name])}, names
        for row in rows:
            assert row.keys, row.cells


def test_every_spelt_out_value_is_in_the_row_of_its_key() -> None:
    definitions = load_schema()["$defs"]
    for names, rows in tables():
        for name in names:
            for key, schema in properties(definitions[name]).items():
                # `all` is for some verbs only, though the schema has it for each
                among = [row for row in rows if key in row.keys or schema.get("$ref") == "#/$defs/buffers"]
                text = " ".join(cell for row in among for cell in row.cells)
                for value in values(schema, definitions):
                    assert written(value) in text, f"{name}.{key}: {value}"


def test_keys_called_required_are_required() -> None:
    definitions = load_schema()["$defs"]
    for names, rows in tables():
        required = {key for name in names for key in definitions[name].get("required", ())}
        if any(row.cells[-1] == "required" for row in rows):
            listed = {key for row in rows for key in row.keys if any("required" in cell for cell in row.cells)}
            assert listed == required, names


def test_links_lead_to_sections() -> None:
    anchors = {title.lower().replace(" ", "-") for title in re.findall("^#+ (.*)$", PAGE, re.MULTILINE)}
    links = set(re.findall(r"\]\(#([^)]*)\)", PAGE))
    assert links and links <= anchors


# Words and numbers of the code


def test_codes_are_those_of_the_modules() -> None:
    codes: dict[str, str] = {}
    for module in pkgutil.iter_modules(kvgen.__path__):
        if module.name != "__main__":
            own = getattr(importlib.import_module(f"kvgen.{module.name}"), "CODES", {})
            assert not set(own) & set(codes)
            codes |= own
    listed = re.findall(r"(KV\d{3}) \| (.*?) (?=\|)", section("Problems"))
    assert sorted(listed) == sorted(codes.items())


def test_functions_dtypes_and_words() -> None:
    table = re.search(r"^\| function .*\n\|[-|]*\|\n((?:\|.*\n)*)", PAGE, re.MULTILINE)[1]
    functions = [name for line in table.splitlines() for name in re.findall(r"`(\w+)\(", line.split("|")[1])]
    assert sorted(functions) == sorted(expr.FUNCTIONS)
    dtypes = re.search(r"^Dtypes: ((?:`\w+`,? )+)", PAGE, re.MULTILINE)[1]
    assert re.findall(r"`(\w+)`", dtypes) == list(types.DTYPES)
    words = re.search(r"word\s+of\s+the\s+language\s+\((.*?)\)", PAGE, re.DOTALL)[1]
    assert re.findall(r"`(\w+)`", words) == list(types.WORDS_OF_THE_LANGUAGE)


def test_limits() -> None:
    text = " ".join(PAGE.split())
    for limit in (
        f"at most {source.MAX_BYTES >> 20} MiB",
        f"nested at most {source.MAX_DEPTH} deep",
        f"at most {scalars.MAX_DIGITS} digits, exponents up to {scalars.MAX_EXPONENT}",
        f"at most {expr.MAX_CHARACTERS:,} characters, nests at most {expr.MAX_DEPTH} deep",
        f"at most {load_schema()['$defs']['name']['maxLength']} long",
        f"{spec.LIMITS['let']} lets, {spec.LIMITS['formats']} formats, {spec.LIMITS['buffers']} buffers",
        f"{spec.MAX_SETS} layer sets, {spec.LIMITS['spaces']} spaces, {spec.MAX_CASES} cases of a name",
        f"({check.CASES_MAX} with the cases",
        f"{spec.MAX_PAGE_ITEMS} planes and gaps of a page, {spec.LIMITS['expect']} expectations",
        f"{types.MAX_LAYERS:,} elements of a list",
        f"2^{types.DERIVED_SLOTS_MAX.bit_length() - 1} slots of a page that a space with `slot`",
        f"between 0 and {types.MAX_LAYERS - 1:,}",
        f"at most {types.MAX_LAYERS:,} layers",
        f"within {types.MAGNITUDE_MAX.bit_length() - 1} bits",
        f"({cases.COMBINATIONS_MAX:,} at most",
        f"for an int 2^{types.PARAMETER_MAX.bit_length() - 1}",
        f"1 to 2^{placing.PAGE_BYTES_MAX.bit_length() - 1} bytes",
    ):
        assert limit in text, limit


# What the page says is refused

REFUSED = {
    "a division that leaves a remainder": ("KV217", "layers: {body: 7 / 2}"),
    "no ratio is an int": ("KV212", "layers: {body: 0.5 * 2}"),
    "tokens are a ratio": ("KV212", "spaces:\n  token: {slots: tokens // 4, page: 16}"),
    "slots that are not affine": ("KV248", "spaces:\n  token: {slots: tokens * tokens, page: 16}"),
    "comparisons do not chain": ("KV201", "layers: {body: 1 if 0 < 1 < 2 else 1}"),
    "no `not in`": ("KV201", "config: {x: {type: list, of: int}}\nlayers: {body: 1 if 1 not in x else 2}"),
    "a literal that is never a value": (
        "KV212",
        "choices: {f: {of: [a, b], default: a}}\nlayers: {body: 1 if f == 'c' else 2}",
    ),
    "a `require` guards no layer count": (
        "KV215",
        "config: {n: {type: int}}\nrequire: [{that: n > 0, else: no n}]\nlayers: {body: 8 // n}",
    ),
    "an optional name without `has`": ("KV213", "config: {n: {type: int, optional: true}}\nlayers: {body: n}"),
    "an index without a guard": (
        "KV214",
        "config: {x: {type: list, of: int}}\nlayers: {body: 1 if 0 in x else 1, sets: {s: 'x[layer] > 0'}}\n"
        "buffers:\n  kv: {format: row, space: token, layers: s}",
    ),
    "an index guarded for the body only": (
        "KV214",
        "config: {n: {type: int}, x: {type: list, of: int}}\nrequire: [{that: len(x) >= n, else: short}]\n"
        "layers: {body: n, draft: 1, sets: {s: 'x[layer] > 0'}}\n"
        "buffers:\n  kv: {format: row, space: token, layers: s}",
    ),
    "a `require` guards nothing where `layer` has no value": (
        "KV214",
        "config: {x: {type: list, of: int}}\nrequire: [{that: len(x) > 0, else: short}]\nlayers: {body: 'x[0]'}",
    ),
    "`layer` in a `when`": (
        "KV211",
        "layers: {body: 2, sets: {s: [{when: layer > 0, use: true}, {use: false}]}}\n"
        "buffers:\n  kv: {format: row, space: token, layers: s}",
    ),
    "`layer` in a space": ("KV211", "spaces:\n  token: {slots: tokens * layer, page: 16}"),
    "`tokens` in a let": ("KV211", "let: {n: tokens}\nspaces:\n  token: {slots: n, page: 16}"),
    "a built-in choice in an expression": ("KV210", "layers: {body: 1 if role == 'both' else 2}"),
    "a combination that no case covers": (
        "KV247",
        "choices: {f: {of: [a, b], default: a}}\nspaces:\n  token: [{when: f == 'a', use: {slots: tokens, page: 16}}]",
    ),
    "a case that never holds": (
        "KV247",
        "choices: {f: {of: [a, b], default: a}}\nspaces:\n  token:\n"
        "    - {when: f == 'a', use: {slots: tokens, page: 16}}\n"
        "    - {when: f != 'a', use: {slots: tokens, page: 8}}\n"
        "    - {when: f == 'b', use: {slots: tokens, page: 4}}",
    ),
    "a let with cases": ("KV104", "let: {n: [{use: 1}]}\nlayers: {body: n}"),
    "a word and an integer in one domain": (
        "KV245",
        "choices: {f: {of: [a, 1], default: a}}\nlayers: {body: 1 if f == 'a' else 2}",
    ),
    "letters of an int": ("KV203", "config: {n: {type: int, of: FS}}\nlayers: {body: n}"),
    "a list without `of`": ("KV203", "config: {x: {type: list}}\nlayers: {body: len(x)}"),
    "a choice without a default": ("KV103", "choices: {n: {type: int}}\nlayers: {body: n}"),
    "a computed source of a text": (
        "KV251",
        "config: {f: {of: [a, b], from: x + y}}\nlayers: {body: 1 if f == 'a' else 2}",
    ),
    "a field that is read and ignored": ("KV252", "config: {n: {type: int, is: 2}}\nignores: {n: no matter}"),
    "a name that nothing uses": ("KV242", "let: {n: 1}"),
    "a name defined twice": ("KV240", "config: {n: {type: int}}\nlet: {n: 1}\nlayers: {body: n}"),
    "a name that the module uses": ("KV241", "config: {config: {type: int}}\nlayers: {body: config}"),
    "a module of the standard library": ("KV241", "layout: json"),
    "a word of Python": ("KV241", "layout: class"),
    "a divisor that does not divide the page": (
        "KV248",
        "spaces:\n  token: {slots: tokens, page: 16}\n  third: {of: token, slot: offset // 3}\n"
        "buffers:\n  kv: {format: row, space: third, layers: all}",
    ),
    "an axis that is an expression": (
        "KV203",
        "let: {n: 2}\nformats:\n  row: {fields: {k: 'bf16[n * 2]'}, page: [[k]]}",
    ),
    "a number as a piece": (
        "KV104",
        "formats:\n  row: {fields: {k: 'bf16[4, 64]'}, page: [{each: [4, slot], put: [k]}]}",
    ),
    "slots that `each` does not cover": (
        "KV224",
        "formats:\n  row: {fields: {k: 'bf16[64]'}, page: [{each: [slot//4], put: [k]}]}",
    ),
    "an element that is not aligned": (
        "KV225",
        "formats:\n  row: {fields: {k: 'u8[3]', s: 'f32[1]'}, page: [[k, s]]}",
    ),
    "an odd number of e2m1 values": ("KV226", "formats:\n  row: {fields: {k: 'e2m1[3]'}, page: [[k]]}"),
    "a gap that load time decides": (
        "KV227",
        "config: {n: {type: int, min: 1}}\nformats:\n  row: {fields: {k: 'u8[4]'}, page: [[k, {pad: n}]]}",
    ),
    "an initial value of codes": (
        "KV231",
        "formats:\n  row: {fields: {k: {type: 'e4m3[4]', init: 1}}, page: [[k]]}",
    ),
    "codes that are wide": (
        "KV230",
        "formats:\n  row: {fields: {k: {type: 'bf16[64]', quant: {scale: none}}}, page: [[k]]}",
    ),
    "scales that share no axis": (
        "KV230",
        "formats:\n  row: {fields: {k: {type: 'e4m3[64]', quant: {scale: s}}, s: 'f32[4]'}, page: [[k], [s]]}",
    ),
    "blocks that do not divide the page": (
        "KV249",
        "buffers:\n  kv: {format: row, space: token, layers: all, block: 5}",
    ),
    "a store that leaves a field out": ("KV250", "operations: {set_k: {store: [kv]}}"),
    "rows of pages that have none": (
        "KV250",
        "let: {heads: 4}\nformats:\n  row: {fields: {k: 'bf16[heads, 64]'}, page: [{each: [heads, slot], put: [k]}]}\n"
        "operations: {get_k: {view: [kv], as: rows}}",
    ),
    "a verb that is of all buffers": ("KV250", "operations: {copy: {move: [kv]}}"),
    "shared tensors": ("KV205", "tensors: {all_of_them: {each: [page], put: [kv]}}"),
    "readers that are all owners": ("KV249", "buffers:\n  kv: {format: row, space: token, layers: all, readers: all}"),
    "contracts of a buffer": ("KV205", "buffers:\n  kv: {format: row, space: token, layers: all, serves: [kernel]}"),
    "bytes of a shared tensor": ("KV302", "expect: [{block_bytes: {kv: 1}}]"),
    "a layer that reads nothing": ("KV302", "expect: [{reads: {kv: {'1': 0}}}]"),
    "a config above the spec's folder": ("KV302", "expect: [{config: ../config.json, page_total: 1}]"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str, folder: Path) -> None:
    code, extract = REFUSED[what]
    Path("whole.yaml").write_text(whole(extract + "\n"))
    status, output = run("check", "whole.yaml", "--format", "json")
    assert (status, [problem["code"] for problem in json.loads(output)["problems"]]) == (1, [code])


HOLDS = {
    "defaults of `at`": "layers: {body: 2}\nexpect: [{at: kv.k, byte: 0}, {at: kv.k, layer: 1, slot: 17, byte: 2176}]",
    "an enum of ints that a config spells otherwise": (
        "config: {n: {of: {one: 1, two: 2}}}\nlayers: {body: n}\nexpect: [{given: {n: 2}, bytes_per_token: 256}]"
    ),
    "a set that is one `if`": (
        "config: {x: {type: list, of: int}}\n"
        "layers: {body: 3, sets: {s: 'x[layer] > 0 if layer < len(x) else true'}}\n"
        "buffers:\n  kv: {format: row, space: token, layers: s if body else false}\n"
        "expect: [{given: {x: [0, 1]}, owners: {kv: [1, 2]}}]"
    ),
    "pages that differ between layers, and their size": (  # 2 x (5 + 3) bytes, and 16 times that
        "config: {x: {type: list, of: int}}\n"
        "let: {n: 'x[layer] if layer < len(x) else 3', size: 'sizeof(row, 16)'}\nlayers: {body: 2}\n"
        "formats:\n  row: {fields: {k: 'bf16[n]'}, page: [[k]]}\n  copy: {fields: {c: 'u8[size]'}, page: [[c]]}\n"
        "buffers:\n  kv: {format: row, space: token, layers: all}\n"
        "  kv_copy: {format: copy, space: token, layers: all}\n"
        "expect: [{given: {x: [5]}, bytes_per_token: 272, page_total: 4352}]"
    ),
    "split planes without the gap between them": (
        "formats:\n  row: {fields: {k: 'u8[3]', v: 'u8[5]'}, page: [[k], {align: 128}, [v]]}\n"
        "buffers:\n  kv: {format: row, space: token, layers: all, split: true}\n"
        "  kv_whole: {format: row, space: token, layers: all}\n"
        "expect: [{page_total: 336}, {at: kv.v, slot: 17, byte: 85}, {at: kv_whole.v, slot: 17, byte: 341}]"
    ),
    "initial values": (
        "formats:\n  row: {fields: {k: {type: 'f32[2]', init: -inf}, c: {type: 'i32[1]', init: 7}}, page: [[k, c]]}\n"
        "expect: [{slot_bytes: {kv: 12}}]"
    ),
}


@pytest.mark.parametrize("what", HOLDS)
def test_holds(what: str, folder: Path) -> None:
    Path("whole.yaml").write_text(whole(HOLDS[what] + "\n"))
    assert run("check", "whole.yaml") == (0, "")


SCALARS = [
    "yes",
    "no",
    "on",
    "off",
    "~",
    "0777",
    "0x10",
    "1_000",
    "1:30",
    ".5",
    "2001-01-01",
    ".inf",
    "&a",
    "*a",
    "!a",
    "%a",
]


@pytest.mark.parametrize("scalar", SCALARS)
def test_refused_scalars(scalar: str) -> None:
    listed, problems = section("Files"), read_source("a.yaml", f"a: {scalar}\n".encode())[1]
    assert len(problems) == 1
    assert f"`{scalar}`" in listed or scalar in SCALARS[10:]


def test_scalars_that_are_read() -> None:
    found, problems = read_source("a.yaml", b"\xef\xbb\xbfa: [12, -3, 0.5, 1e-4, true, false, null, a-b, '1']\r\n")
    assert not problems and found is not None
    shown = [f"{item.value}" for item in found.root.get("a")]
    assert shown == ["12", "-3", "1/2", "1/10000", "True", "False", "None", "a-b", "1"]


def refusal(folder: Path, extract: str, config: dict[str, Any], *words: str) -> tuple[int, str]:
    (folder / "whole.yaml").write_text(whole(extract))
    (folder / "own.json").write_text(json.dumps(config))
    status, output = run("budget", "whole.yaml", "--config", "own.json", "--format", "json", *words)
    return status, "\n".join(problem["message"] for problem in json.loads(output)["problems"])


def test_token_counts_that_are_no_multiple_of_the_granule(folder: Path) -> None:
    status, message = refusal(folder, "layers: {body: 1}\n", {}, "--tokens", "17")
    assert status == 2 and all(number in message for number in ("17", "16", "32"))


def test_rules_of_a_set_that_part(folder: Path) -> None:
    extract = (
        "config:\n  n: {type: int}\n  owners: {type: list, of: int, optional: true}\nlayers:\n  body: n\n  sets:\n"
        "    s: [{when: has(owners), use: layer in owners}, {when: n > 2, use: layer % 2 == 0}, {use: true}]\n"
        "buffers:\n  kv: {format: row, space: token, layers: s}\n"
    )
    status, message = refusal(folder, extract, {"n": 4, "owners": [0, 1, 2]}, "--tokens", "16")
    assert status == 1 and all(part in message for part in ("has(owners)", "n > 2", "layer 1"))


def test_a_requirement_of_every_layer_names_the_first_that_breaks_it(folder: Path) -> None:
    extract = "config: {n: {type: int}}\nrequire: [{that: layer < 3, else: too deep}]\nlayers: {body: n}\n"
    assert refusal(folder, extract, {"n": 9}, "--tokens", "16") == (1, "layer 3: too deep")


def test_numbers_for_which_no_case_holds(folder: Path) -> None:
    extract = (
        "config: {n: {type: int}}\nspaces:\n  token:\n    - {when: n > 3, use: {slots: tokens, page: 16}}\n"
        "    - {when: n < 2, use: {slots: tokens, page: 8}}\n"
    )
    status, message = refusal(folder, extract, {"n": 2}, "--tokens", "16")
    assert status == 1 and "no case" in message


def test_a_list_on_the_command_line(folder: Path) -> None:
    """Three layers, because the list has three elements; a row has 128 bytes."""
    Path("whole.yaml").write_text(whole("choices: {x: {type: list, of: int, default: [1]}}\nlayers: {body: len(x)}\n"))
    Path("own.json").write_text("{}")
    words = ("budget", "whole.yaml", "--config", "own.json", "--tokens", "16", "--format", "json", "--set")
    status, output = run(*words, "x=0,128,128")
    assert status == 0 and json.loads(output)["choices"]["x"] == [0, 128, 128]
    assert json.loads(output)["bytes_per_token"] == 3 * 128
    assert run(*words, "x=0,a")[0] == 2


def test_divisors_under_a_guard(folder: Path) -> None:
    """A page of 64 // 4 slots; the `require` comes before the space, and an `if` guards its own branch."""
    extract = (
        "config: {n: {type: int}}\nrequire: [{that: n > 0, else: no n}]\nlayers: {body: 8 // n if n > 0 else 1}\n"
        "spaces: {token: {slots: tokens, page: 'max(1, 64 // n)'}}\n"
    )
    Path("whole.yaml").write_text(whole(extract))
    Path("own.json").write_text('{"n": 4}')
    status, output = run("budget", "whole.yaml", "--config", "own.json", "--tokens", "16", "--format", "json")
    assert status == 0 and len(json.loads(output)["buffers"][0]["layers"]) == 2
    assert json.loads(output)["buffers"][0]["slots"] == 16 + 16


def test_operations_over_buffers_whose_layers_meet(folder: Path) -> None:
    extract = (
        "config: {n: {type: int}}\nlayers: {body: 4, sets: {early: layer < n, late: layer >= 2}}\n"
        "buffers:\n  kv: {format: row, space: token, layers: early}\n  kw: {format: row, space: token, layers: late}\n"
        "operations: {show: {view: [kv, kw]}}\n"
    )
    assert refusal(folder, extract, {"n": 2}, "--tokens", "17")[0] == 2  # accepted, but for the token count
    status, message = refusal(folder, extract, {"n": 3}, "--tokens", "16")
    assert status == 1 and message == "layer 2: show cannot tell kv from kw: both are owned here"


def test_layers_of_a_role(folder: Path) -> None:
    """4 layers of the body, 2 of the draft; a row has 128 bytes."""
    Path("whole.yaml").write_text(whole("layers: {body: 4, draft: 2}\n"))
    for words, layers in (
        ((), 4),
        (("role=draft",), 2),
        (("role=both",), 6),
        (("role=both", "start_layer=1", "end_layer=5"), 4),
        (("start_layer=1",), 3),
    ):
        settings = [word for setting in words for word in ("--set", setting)]
        _, output = run(
            "budget", "whole.yaml", "--config", "config.json", "--tokens", "0", "--format", "json", *settings
        )
        assert json.loads(output)["bytes_per_token"] == 128 * layers


def test_build_writes_nothing_for_a_fragment(folder: Path) -> None:
    assert run("build", "rows.yaml")[0] == 0
    assert not list(folder.glob("**/*.py"))
