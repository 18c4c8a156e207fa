"""Generated text: as linter and formatter leave it, the same everywhere, with a fingerprint of what decides bytes."""

import ast
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvgen.check import check_spec
from kvgen.compile import Compiled, compile_spec
from kvgen.layout import resolve
from kvgen.nodes import plain
from kvgen.source import read_source
from kvgen.spec import load_spec

ROOT = Path(__file__).parent.parent
SPECS = sorted((ROOT / "specs").glob("*.yaml"))
LANGUAGE = sorted((ROOT / "tests" / "language").glob("*.yaml"))
GOLDEN = sorted((ROOT / "tests" / "golden").glob("*/spec.yaml"))
LAYOUTS = [path for path in (*SPECS, *LANGUAGE, *GOLDEN) if "\nlayout:" in path.read_text(encoding="utf-8")]


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@cache
def compiled_file(path: Path) -> Compiled:
    return compile_spec(str(path), lambda file: Path(file).read_bytes())


def compiled(text: str, file: str = "spec.yaml") -> Compiled:
    made = compile_spec(file, lambda name: text.encode("utf-8"))
    assert made.module is not None and made.layout is not None and not made.failed, made.problems
    return made


def fingerprint(text: str) -> str:
    """What a module of the spec has as its LAYOUT_FINGERPRINT, without making the module."""
    loaded = load_spec("spec.yaml", lambda name: text.encode("utf-8"))
    assert loaded.spec is not None, loaded.problems
    scope, problems = check_spec(loaded.spec)
    assert problems == []
    return resolve(loaded.spec, scope).fingerprint


# Lint and format


def words(start: str, length: int) -> str:
    return f"{start}_{'name_that_goes_on_and_on_' * 4}"[:length].rstrip("_").ljust(length, "x")


LONG = {part: words(part, 38) for part in ("config", "choice", "let", "layered", "set", "space", "format", "field")}
LONG |= {part: words(part, 38) for part in ("buffer", "alias", "layout", "aa", "bb", "cc", "dd")}
SENTENCE = ("words that say in some detail what is wrong with the model or with the deployment of it" * 2)[:114]

LONG_NAMES = f"""\
kvgen: 1
layout: {LONG["layout"]}
doc: {SENTENCE}
config:
  num_layers: {{type: int, from: num_hidden_layers}}
  {LONG["config"]}: {{type: int, min: 1}}
  kinds: {{type: list, of: {{sliding_attention: sliding, full_attention: full, linear_attention: linear,
    chunked_attention: chunked, compressed_attention: compressed}}, optional: true}}
choices:
  {LONG["choice"]}: {{of: [{LONG["aa"]}, {LONG["bb"]}, {LONG["cc"]}, {LONG["dd"]}], default: {LONG["aa"]}}}
  {LONG["choice"]}_b: {{type: int, default: 1}}
let:
  {LONG["let"]}: {LONG["config"]} * 2
  {LONG["layered"]}: {LONG["let"]} if layer < 1 else {LONG["config"]}
require:
  - {{that: {LONG["let"]} > 1 and (not has(kinds) or len(kinds) < 100), else: {SENTENCE}}}
  - {{that: layer >= 0, else: {SENTENCE}}}
layers:
  body: num_layers
  draft: {LONG["choice"]}_b
  sets:
    {LONG["set"]}: layer < {LONG["let"]}
spaces:
  {LONG["space"]}: {{slots: tokens, page: 16}}
formats:
  {LONG["format"]}:
    fields:
      {LONG["field"]}: "u8[{LONG["layered"]}]"
      other: {{type: "e4m3[{LONG["config"]}, {LONG["let"]}]", quant: {{scale: {LONG["field"]}_s, floor: 1e-4}}}}
      {LONG["field"]}_s: "f32[{LONG["config"]}]"
    page: [[other], {{align: 8}}, ["{LONG["field"]}_s"], ["{LONG["field"]}"]]
  {LONG["format"]}_b:
    fields: {LONG["format"]}
    page: [{{each: [slot, "{LONG["config"]}"], put: [other]}}, {{align: 8}}, ["{LONG["field"]}_s"], ["{LONG["field"]}"]]
  {LONG["alias"]}:
    - {{when: {LONG["choice"]} == '{LONG["aa"]}', use: {LONG["format"]}}}
    - {{use: {LONG["format"]}_b}}
buffers:
  {LONG["buffer"]}: {{format: {LONG["alias"]}, space: {LONG["space"]}, layers: {LONG["set"]}}}
"""

ODD_CASES = """\
kvgen: 1
layout: odd
doc: Cases and conditions that linters would write otherwise
config:
  n: {type: int, from: num_hidden_layers}
  size: {type: int, from: [size, hidden_size / heads, "lcm(a.b, max(a.c, 4)) - -2"]}
  short: {type: int, min: -3}
choices:
  f: {of: [aa, bb, cc], default: aa}
  e: {type: bool, default: true}
let:
  q: true if short > 1 else false
  r: false if short > 1 else true
  s: 2 if not e else 3
require:
  - {that: "1 < size and 'aa' != f or (e == true and not (e != true)) or size == 7", else: nothing fits}
  - {that: "not q == r and -(-short) < 9 and 0.5 < size", else: not this}
layers:
  body: n
  sets:
    every: layer >= 0 or not layer in all_of_them
    all_of_them: true
    none_of_them: false
spaces:
  token: {slots: tokens, page: 16}
formats:
  x: {fields: {k: "bf16[4]"}, page: [[k]]}
  y: {fields: {k: "bf16[s]"}, page: [[k]]}
  z:
    - {when: f == 'aa', use: x}
    - {when: f == 'bb', use: x}
    - {use: y}
  w:
    - {when: e, use: x}
    - {use: x}
buffers:
  kv: {format: z, space: token, layers: all_of_them}
  none: {format: w, space: token, layers: none_of_them}
""".replace(" or not layer in all_of_them", " and not none_of_them").replace(
    "layers: all_of_them}", "layers: every and all_of_them}"
)

ONE_FIELD = """\
kvgen: 1
layout: one_field
doc: Operations that take or return one field
let: {heads: 2, dim: 16}
layers: {body: 2}
spaces: {token: {slots: tokens, page: 8}}
formats:
  row: {fields: {k: "bf16[4]"}, page: [[k]]}
  nvfp4:
    fields: {k: {type: "e2m1[heads, dim]", quant: {scale: k_scale, outer: given}}, k_scale: "e4m3[heads]"}
    page: [[k], [k_scale]]
buffers:
  kv: {format: row, space: token, layers: layer == 0}
  kv_coded: {format: nvfp4, space: token, layers: layer == 1}
operations:
  set_k: {store: [kv], args: {key: k}}
  put_k: {put: [kv], args: {key: k}}
  load_k: {load: [kv], returns: [k]}
  get_k: {get: [kv], returns: [k]}
  gather_k: {gather: [kv], returns: [k]}
  load_codes: {load: [kv_coded], returns: [k]}
  get_codes: {get: [kv_coded], returns: [k]}
  gather_scales: {gather: [kv_coded], returns: [k_scale]}
"""


def ruff(folder: Path, *command: str) -> str:
    """What ruff has to say about a folder of modules; nothing where it would leave them as they are."""
    line = [sys.executable, "-m", "ruff", *command, "--no-cache", "--config", str(ROOT / "pyproject.toml"), str(folder)]
    done = subprocess.run(line, capture_output=True, text=True, encoding="utf-8")
    return f"{done.stdout}{done.stderr}" if done.returncode else ""


@pytest.fixture(scope="module")
def folder_of_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every module that the project's specs make, and some odd ones."""
    folder = tmp_path_factory.mktemp("modules")
    for path in LAYOUTS:
        made = compiled_file(path)
        assert made.module is not None, made.problems
        (folder / f"{path.parent.name}_{path.stem}.py").write_text(made.module.text, encoding="utf-8")
    odd = {"long_names": compiled(LONG_NAMES), "odd_cases": compiled(ODD_CASES), "one_field": compiled(ONE_FIELD)}
    odd["long_file"] = compiled(LONG_NAMES, f"folder/{'file_name_' * 20}.yaml")
    odd["longer_file"] = compiled(LONG_NAMES, "f" * 30)
    for name, made in odd.items():
        assert made.module is not None
        (folder / f"{name}.py").write_text(made.module.text, encoding="utf-8")
    return folder


def test_modules_are_lint_clean(folder_of_modules: Path) -> None:
    assert ruff(folder_of_modules, "check") == ""


def test_modules_are_formatted(folder_of_modules: Path) -> None:
    assert ruff(folder_of_modules, "format", "--diff") == ""


def test_ruff_would_complain(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import os\nx = 'a'\n", encoding="utf-8")
    assert "F401" in ruff(tmp_path, "check")
    assert '+x = "a"' in ruff(tmp_path, "format", "--diff")


def test_odd_cases_work() -> None:
    """What is printed the way linters want it means the same."""
    module = compiled(ODD_CASES).namespace
    assert module is not None
    make = module.Layout.from_config
    config = {"num_hidden_layers": 2, "short": 5}
    for fields, size in (({"size": 7}, 7), ({"hidden_size": 96, "heads": 8}, 12), ({"a": {"b": 6, "c": 2}}, 14)):
        assert make({**config, **fields}).config_used == {"num_hidden_layers": 2, "short": 5, **flattened(fields)}, size
    pages = [
        make({**config, "size": 7}, f=f, e=e).buffers[0].page.page_bytes
        for f in ("aa", "bb", "cc")
        for e in (True, False)
    ]
    assert pages == [128, 128, 128, 128, 96, 64]
    assert make({**config, "size": 7}).layers("kv") == (0, 1) and make({**config, "size": 7}).layers("none") == ()
    for choices in ({"e": False, "f": "aa"}, {"e": False, "f": "bb"}):
        with pytest.raises(module.LayoutError, match="nothing fits"):
            make({**config, "size": 1}, **choices)
    with pytest.raises(module.LayoutError, match="not this"):
        make({**config, "size": 7, "short": 9})
    assert make({**config, "size": 7, "short": -3}).layers("kv") == (0, 1)


def flattened(fields: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in fields.items():
        found |= flattened(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return found


# Imports


@pytest.mark.parametrize("path", LAYOUTS, ids=name_of)
def test_the_layout_part_needs_the_standard_library_alone(path: Path) -> None:
    made = compiled_file(path)
    assert made.module is not None
    layout_part, pool_part = (ast.parse(text) for text in (made.module.layout_text, made.module.pool_text))
    assert imports(layout_part) <= sys.stdlib_module_names
    assert imports(pool_part) == {"torch", "triton"}
    assert made.module.text == made.module.layout_text + made.module.pool_text
    compile(made.module.text, "module.py", "exec", dont_inherit=True)


def imports(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return found


def test_the_layout_part_runs_with_nothing_else_there(tmp_path: Path) -> None:
    """An interpreter without site packages prices a model with the text of the layout part."""
    made = compiled_file(ROOT / "specs" / "glm_dsa.yaml")
    assert made.module is not None
    (tmp_path / "part.py").write_text(made.module.layout_text, encoding="utf-8")
    config = {"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    script = f"import part; print(part.cell_size(part.Layout.from_config({config})), part.Layout is part.GlmDsaLayout)"
    line = [sys.executable, "-S", "-E", "-s", "-c", script]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8")
    assert (done.stdout, done.stderr) == ("1576 True\n", "")


# The same text everywhere


def build(folder: Path, specs: list[str], environment: Mapping[str, str]) -> dict[str, bytes]:
    """What `kvgen build` in another process writes, by file name."""
    output = folder / "output"
    line = [sys.executable, "-m", "kvgen", "build", *specs, "-o", str(output)]
    everything = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(line, cwd=folder, env=everything, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.name: path.read_bytes() for path in output.glob("*.py")}


def test_the_same_text_everywhere(tmp_path: Path) -> None:
    """Another process, hash seed, locale, time zone, day, folder, path and order: the same bytes."""
    paths = [path for path in LAYOUTS if path not in GOLDEN]
    expected = {f"{path.stem}.py": compiled_file(path).module.text.encode() for path in paths}  # type: ignore[union-attr]
    first, second = tmp_path / "first", tmp_path / "second folder"
    for folder in (first, second):
        folder.mkdir()
    environment = {"PYTHONHASHSEED": "1", "LC_ALL": "C", "TZ": "Pacific/Kiritimati", "PYTHONUTF8": "0"}
    assert build(first, [str(path) for path in paths], environment) == expected
    for path in (*SPECS, *LANGUAGE):
        target = second / path.parent.name
        target.mkdir(exist_ok=True)
        shutil.copy(path, target / path.name)
        os.utime(target / path.name, (0, 0))
    relative = [f"./{path.parent.name}/../{path.parent.name}/{path.name}" for path in reversed(paths)]
    environment = {"PYTHONHASHSEED": "77", "LC_ALL": "C.UTF-8", "LANG": "tr_TR.UTF-8", "TZ": "America/New_York"}
    assert build(second, relative, environment) == expected


def test_committed_modules_are_current() -> None:
    for path in SPECS:
        made = compiled_file(path)
        if made.module is not None:
            assert (ROOT / "generated" / f"{path.stem}.py").read_text(encoding="utf-8") == made.module.text


# Fingerprints


THING = """\
kvgen: 1
layout: thing
doc: Every part that decides a byte
config:
  n: {type: int, from: num_hidden_layers}
  drafts: {type: int, from: num_drafts, default: 1}
  dim: {type: int, is: 64}
  kinds: {type: list, of: {full_attention: full, other_attention: other}, optional: true}
  freq: {type: int, min: 1, max: 8, default: 2}
  letters: {type: text, of: FS, default: FS}
choices:
  kv_format: {of: [plain, coded], default: plain}
  ratio: {type: ratio, min: 0, default: 1/2}
  wide: {type: bool, default: false}
let:
  heads: 4 if wide else 2
  part: dim // 4
require:
  - {that: freq < 8, else: the frequency is too high}
layers:
  body: n
  draft: drafts
  sets:
    owns:
      - {when: has(kinds), use: "layer < len(kinds) and kinds[layer] == 'full'"}
      - {use: layer % freq == 0}
spaces:
  token: {slots: tokens, page: 16}
  half: {of: token, slots: tokens * ratio, page: 16, reserve: 2}
  pooled: {of: token, slot: offset // 4}
  ring: {of: token, slot: offset % 8, where: offset % 2 == 0}
  state:
    - {when: wide, use: {slots: requests * 2 + 4, page: 2}}
    - {use: {slots: requests, page: 1}}
formats:
  plain:
    fields: {k: "bf16[heads, dim]", v: "bf16[heads, part]"}
    page: [[k], {align: 8}, [v, {pad: 2}]]
  coded:
    fields:
      k: {type: "e4m3[heads, dim]", quant: {scale: k_scale, floor: 1e-4}}
      k_scale: "f32[heads, dim//16]"
      v: "bf16[heads, part]"
    page:
      - {each: [heads, slot], put: ["k[dim//4%8, dim%4, dim//32]"]}
      - [k_scale]
      - [v]
  row:
    - {when: kv_format == 'plain', use: plain}
    - {use: coded}
  other:
    fields: {s: {type: "f32[dim]", init: -inf}, t: "i32[2]"}
    page: [[s], [t]]
buffers:
  kv: {format: row, space: token, layers: owns, split: wide}
  kv_half: {format: row, space: half, layers: not owns, block: 8}
  kv_pooled: {format: row, space: pooled, layers: draft, align: 64, memory: host}
  kv_ring: {format: other, space: ring, layers: body}
  drafts_ring: {format: other, space: ring, layers: draft and n > 0}
  states: {format: other, space: state, layers: letters[layer % len(letters)] == 'F' and len(letters) > 0}
operations:
  set_other: {store: [kv_ring], args: {a: s, b: t}}
""".replace(
    "letters[layer % len(letters)] == 'F' and len(letters) > 0",
    "\"len(letters) > 0 and letters[layer % len(letters)] == 'F'\"",
)

CHANGES = [  # (before, after): each decides what bytes there are, or when there are any
    ("layout: thing", "layout: other"),
    ("from: num_hidden_layers", "from: num_layers"),
    ("from: num_hidden_layers", "from: [num_hidden_layers, num_layers]"),
    ("from: num_drafts, default: 1", "from: num_drafts, default: 0"),
    ("from: num_drafts, default: 1", "from: num_drafts + 1, default: 1"),
    ("is: 64", "is: 32"),
    ("{full_attention: full, other_attention: other}", "{full_attention: full, another: other}"),
    ("{full_attention: full, other_attention: other}", "{full_attention: other, other_attention: full}"),
    ("min: 1, max: 8", "min: 2, max: 8"),
    ("min: 1, max: 8", "min: 1, max: 9"),
    ("max: 8, default: 2", "max: 8, default: 3"),
    ("of: FS, default: FS", "of: FS, default: SF"),
    ("of: FS, default: FS", "of: FSX, default: FS"),
    ("default: plain}", "default: coded}"),
    ("ratio, min: 0, default: 1/2", "ratio, min: 0, default: 1/3"),
    ("ratio, min: 0, default: 1/2", "ratio, min: 1/4, default: 1/2"),
    ("type: bool, default: false", "type: bool, default: true"),
    ("heads: 4 if wide else 2", "heads: 4 if wide else 1"),
    ("part: dim // 4", "part: dim // 2"),
    ("that: freq < 8", "that: freq < 7"),
    ("body: n", "body: n * 2"),
    ("draft: drafts", "draft: drafts * 2"),
    ("kinds[layer] == 'full'", "kinds[layer] == 'other'"),
    ("layer % freq == 0", "layer % freq != 0"),
    ("layer % freq == 0", "(layer + 1) % freq == 0"),
    ("token: {slots: tokens, page: 16}", "token: {slots: tokens * 2, page: 16}"),
    ("token: {slots: tokens, page: 16}", "token: {slots: tokens, page: 32}"),
    ("token: {slots: tokens, page: 16}", "token: {slots: tokens + 16, page: 16}"),
    ("token: {slots: tokens, page: 16}", "token: {slots: tokens, page: 16, reserve: 0}"),
    ("slots: tokens * ratio, page: 16, reserve: 2", "slots: tokens * ratio, page: 8, reserve: 2"),
    ("slots: tokens * ratio, page: 16, reserve: 2", "slots: tokens * ratio, page: 16"),
    ("slots: tokens * ratio", "slots: tokens * ratio * 2"),
    ("half: {of: token, slots", "half: {slots"),
    ("offset // 4", "offset // 2"),
    ("slot: offset % 8", "slot: offset % 4"),
    ("slot: offset % 8", "slot: offset // 8"),
    ("where: offset % 2 == 0", "where: offset % 2 == 1"),
    ("requests * 2 + 4", "requests * 3 + 4"),
    ("requests * 2 + 4", "requests * 2 + 5"),
    ("- {when: wide, use: {slots", "- {when: not wide, use: {slots"),
    ('k: "bf16[heads, dim]"', 'k: "f16[heads, dim]"'),
    ('k: "bf16[heads, dim]"', 'k: "bf16[dim, heads]"'),
    ('k: "bf16[heads, dim]"', 'k: "bf16[heads, part]"'),
    ("page: [[k], {align: 8}, [v, {pad: 2}]]", "page: [[v, {pad: 2}], {align: 8}, [k]]"),
    ("page: [[k], {align: 8}, [v, {pad: 2}]]", "page: [[k], {align: 4096}, [v, {pad: 2}]]"),
    ("page: [[k], {align: 8}, [v, {pad: 2}]]", "page: [[k], {align: 8}, [v, {pad: 4}]]"),
    ("page: [[k], {align: 8}, [v, {pad: 2}]]", "page: [[k, v, {pad: 2}]]"),
    ("scale: k_scale, floor: 1e-4", "scale: k_scale, floor: 1e-5"),
    ("scale: k_scale, floor: 1e-4", "scale: k_scale, floor: 1e-4, round: pow2"),
    ("scale: k_scale, floor: 1e-4", "scale: k_scale, floor: 1e-4, code: divide"),
    ("scale: k_scale, floor: 1e-4", "scale: k_scale, floor: 1e-4, outer: given"),
    ("scale: k_scale, floor: 1e-4", "scale: none"),
    ('k: {type: "e4m3', 'k: {type: "e5m2'),
    ('k_scale: "f32', 'k_scale: "f16'),
    ("dim//16", "dim//32"),
    ("k[dim//4%8, dim%4, dim//32]", "k[dim%4, dim//4%8, dim//32]"),
    ("k[dim//4%8, dim%4, dim//32]", "k[dim//8%4, dim%8, dim//32]"),
    ("each: [heads, slot]", "each: [slot, heads]"),
    ("each: [heads, slot]", "each: [heads, slot//4, slot%4]"),
    ("each: [heads, slot]", "each: [heads, slot%4, slot//4]"),
    ("init: -inf", "init: 0"),
    ("init: -inf", "init: 1"),
    ("page: [[s], [t]]", "page: [[t], [s]]"),
    ("- {when: kv_format == 'plain', use: plain}", "- {when: kv_format == 'coded', use: plain}"),
    ("layers: owns, split: wide", "layers: owns"),
    ("layers: owns, split: wide", "layers: owns, split: not wide"),
    ("layers: owns, split: wide", "layers: all, split: wide"),
    ("layers: not owns, block: 8", "layers: not owns, block: 4"),
    ("layers: not owns, block: 8", "layers: not owns"),
    ("align: 64", "align: 128"),
    (", memory: host", ""),
    ("space: ring, layers: body", "space: pooled, layers: body"),
    ("space: ring, layers: body", "space: ring, layers: draft"),
    ("drafts_ring: {format: other", "drafts_ring: {format: plain"),
]
NO_CHANGES = [  # what says the same in other words, or to other readers
    ("doc: Every part that decides a byte", 'doc: Something else, said with "quotes" and a backslash \\\\'),
    ("layout: thing", "layout: thing   # a comment"),
    ("layout: thing", "# a comment\n\n\nlayout: thing"),
    ("else: the frequency is too high", "else: it is too high"),
    ("heads: 4 if wide else 2", "heads: (4 if (wide) else (2))"),
    ("heads: 4 if wide else 2", "'heads':    \"4   if wide else 2\""),
    ("part: dim // 4", "part: 16"),
    (
        "page: [[k], {align: 8}, [v, {pad: 2}]]",
        "page: [{each: [slot], put: [k]}, {align: 8}, {each: [slot], put: [v, {pad: 2}]}]",
    ),
    ("floor: 1e-4", "floor: 0.0001"),
    ("floor: 1e-4", "floor: 1e-4, round: exact, code: reciprocal"),
    ("layers: body}", "layers: body, memory: device}"),
    ("token: {slots: tokens, page: 16}", "token: {slots: tokens, page: 16, reserve: 1}"),
    ("default: 1/2", "default: 0.5"),
    ("set_other:", "set_another:"),
    ("layout: thing", "license: MIT\nlayout: thing"),
]


def changed(before: str, after: str) -> str:
    assert THING.count(before) == 1, (before, THING.count(before))
    return THING.replace(before, after)


def test_whatever_decides_a_byte_changes_the_fingerprint() -> None:
    """Each change gives a fingerprint that neither the spec nor any other change has."""
    made = compiled(THING)
    assert made.module is not None and made.namespace is not None
    assert fingerprint(THING) == made.namespace.LAYOUT_FINGERPRINT
    assert f'LAYOUT_FINGERPRINT = "{fingerprint(THING)}"\n' in made.module.text
    seen = {fingerprint(THING): ("", "")}
    for change in CHANGES:
        found = fingerprint(changed(*change))
        assert found not in seen, (change, seen[found])
        seen[found] = change
    assert all(len(found) == 16 and int(found, 16) >= 0 for found in seen)


@pytest.mark.parametrize("change", NO_CHANGES, ids=lambda change: change[1][:24])
def test_what_decides_no_byte_leaves_the_fingerprint(change: tuple[str, str]) -> None:
    assert fingerprint(changed(*change)) == fingerprint(THING)


@pytest.mark.parametrize(
    "license",
    [
        "MIT",
        "GPL-2.0+ WITH Classpath-exception-2.0",
        "(MIT OR Apache-2.0) AND (BSD-3-Clause OR (ISC AND Zlib))",
        "DocumentRef-a:LicenseRef-b",
    ],
)
def test_license_is_a_line_of_the_head(license: str) -> None:
    """An SPDX line under the one that says where the module is from, and nothing else; without `license`, no line."""
    made, plain = compiled(f"license: {license}\n{THING}").module, compiled(THING).module
    assert made is not None and plain is not None and "SPDX" not in plain.text
    first, line, rest = made.text.split("\n", 2)
    assert line == f"# SPDX-License-Identifier: {license}"
    assert f"{first}\n{rest}" == plain.text


@pytest.mark.parametrize(
    "license",
    ["MIT OR", "OR MIT", "MIT ISC", "MIT or ISC", "MIT  OR ISC", "MIT OR OR ISC", "(MIT", "MIT)", "()", "(MIT) (ISC)"],
)
def test_what_is_not_a_license_expression(license: str) -> None:
    text = f'license: "{license}"\n{THING}'
    found = compile_spec("thing.yaml", lambda file: text.encode())
    assert [problem.code for problem in found.problems] == ["KV253"]


def test_comments_and_spacing_leave_the_module() -> None:
    """Not a letter of the module depends on comments, blank lines, indentation or line ends."""
    commented = "".join(f"{line}   # {position}\n\n# more\n" for position, line in enumerate(THING.splitlines()))
    expected = compiled(THING).module
    assert expected is not None
    for text in (commented, THING.replace("\n", "\r\n"), THING.replace("  ", "     "), f"\ufeff{THING}"):
        assert compiled(text).module == expected


def test_a_size_that_only_another_size_needs_is_in_the_fingerprint() -> None:
    """The cases of a format that no buffer has, asked for by `sizeof`."""
    spec = """\
kvgen: 1
layout: thing
doc: A page that is as large as others
config: {n: {type: int, from: num_hidden_layers}}
choices: {wide: {type: bool, default: false}}
let: {page_size: "sizeof(row, 4)"}
layers: {body: n}
spaces: {token: {slots: tokens, page: page_size}}
formats:
  small: {fields: {k: "u8[2]"}, page: [[k]]}
  large: {fields: {k: "u8[4]"}, page: [[k]]}
  row:
    - {when: wide, use: large}
    - {use: small}
buffers: {kv: {format: small, space: token, layers: body}}
"""
    assert fingerprint(spec) != fingerprint(spec.replace("when: wide", "when: not wide"))


# Mappings have no order


def shuffled(value: Any, draw: random.Random) -> Any:
    """The same value, the keys of every mapping in another order."""
    if isinstance(value, dict):
        keys = list(value)
        draw.shuffle(keys)
        return {key: shuffled(value[key], draw) for key in keys}
    return [shuffled(item, draw) for item in value] if isinstance(value, list) else value


def in_another_order(data: bytes, seed: int) -> bytes:
    """A spec with its mappings shuffled, as JSON, which is YAML too."""
    source, problems = read_source("spec.yaml", data)
    assert source is not None, problems

    def number(value: object) -> float:
        assert isinstance(value, Fraction)
        return float(value)

    return json.dumps(shuffled(plain(source.root), random.Random(seed)), default=number).encode()


def test_shuffling_changes_the_text() -> None:
    texts = {in_another_order(THING.encode(), seed) for seed in range(4)}
    assert len(texts) == 4 and all(b'"layout": "thing"' in text for text in texts)


@pytest.mark.parametrize("path", LAYOUTS, ids=name_of)
def test_the_order_of_mappings_leaves_the_fingerprints(path: Path) -> None:
    """Of the module, and of a layout that it makes."""
    plain_module = compiled_file(path).namespace
    made = compile_spec(str(path), lambda file: in_another_order(Path(file).read_bytes(), 7))
    assert made.namespace is not None and plain_module is not None, made.problems
    assert made.namespace.LAYOUT_FINGERPRINT == plain_module.LAYOUT_FINGERPRINT


def test_the_order_of_mappings_leaves_a_layout() -> None:
    config = {"num_hidden_layers": 5, "dim": 64}
    expected = compiled(THING).namespace.Layout.from_config(config, wide=True, role="both")  # type: ignore[union-attr]
    for seed in range(4):
        module = compiled(in_another_order(THING.encode(), seed).decode()).namespace
        assert module is not None
        layout = module.Layout.from_config(config, role="both", wide=True)
        assert layout.fingerprint == expected.fingerprint
        for buffer in expected.buffers:
            assert layout.page_fingerprint(buffer.name) == expected.page_fingerprint(buffer.name)
            assert layout.layers(buffer.name) == buffer.layers
        assert module.bytes_for(layout, 64, 3) == compiled(THING).namespace.bytes_for(expected, 64, 3)  # type: ignore[union-attr]
