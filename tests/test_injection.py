"""A spec can neither run code at build time nor put code into what is generated, whatever its texts say.

Every text of a spec is filled with hostile ones. Either that is a problem, or the module has the same syntax tree as
for a harmless text once its strings are emptied, imports what modules import, and says what the spec said.
"""

import ast
import builtins
import re
from collections.abc import Iterator

import pytest

from kvgen.compile import Compiled, compile_spec

ALLOWED = {"difflib", "hashlib", "json", "math", "os", "re", "collections.abc", "dataclasses", "fractions", "typing"}
ALLOWED |= {"ctypes", "warnings", "zlib", "itertools", "numbers", "torch", "triton", "triton.language"}

SPEC = """\
kvgen: 1
layout: {layout}
doc: {doc}
license: {license}
include: [{include}]
config:
  num_layers: {{type: int, from: {path}}}
  kinds: {{type: list, of: {{{raw_of_list}: full, other: sliding}}, default: [full]}}
  mode: {{of: {{{raw_of_config}: one, other: two}}, default: one}}
  free: {{type: text, default: {text_of_config}}}
  fixed: {{type: text, is: {text_of_is}}}
  pattern: {{type: text, of: {letters}, default: {letters}}}
choices:
  word: {{of: [{word}, bb], default: bb}}
  note: {{type: text, default: {text_of_choice}}}
  named: {{of: {{{raw_of_choice}: uu, other: vv}}, default: uu}}
let:
  heads: {expression}
require:
  - {{that: mode == 'one' and word == 'bb' and named == 'uu' and free != 'other', else: {message}}}
  - {{that: note != 'other' and heads > 0 and fixed != 'other' and len(pattern) < 99, else: never}}
  - {{that: layer < 50, else: {message_of_layers}}}
layers:
  body: num_layers
  sets:
    {set}: layer >= len(kinds) or kinds[layer] == 'full'
spaces:
  {space}: {{slots: tokens, page: 16}}
formats:
  {format}:
    fields:
      {field}: {type}
    page: [[{part}]]
buffers:
  {buffer}: {{format: {format}, space: {space}, layers: {set}}}
operations:
  {operation}: {{store: [{buffer}], args: {{{argument}: {field}}}}}
expect:
  - {{config: {config}, error: {error}}}
  - {{given: {{num_layers: 2}}, bytes_per_token: 16}}
"""
HARMLESS = {
    "layout": "thing",
    "doc": "A thing",
    "license": "(MIT OR Apache-2.0) AND LicenseRef-Own",
    "include": "rows.yaml",
    "path": "num_hidden_layers",
    "raw_of_list": "full_attention",
    "raw_of_config": "first",
    "text_of_config": "some words",
    "text_of_is": "some words",
    "letters": "FS",
    "word": "aa",
    "text_of_choice": "some words",
    "raw_of_choice": "first",
    "expression": "2 * 2",
    "message": "no good",
    "message_of_layers": "no good either",
    "set": "owners",
    "space": "token",
    "format": "row",
    "field": "k",
    "type": "bf16[heads]",
    "part": "k",
    "buffer": "kv",
    "operation": "set_kv",
    "argument": "cache_k",
    "config": "some.json",
    "error": "is missing",
}
FRAGMENT = "kvgen: 1\nfragment: rows\ndoc: Nothing much\nneeds: {}\nlet: {half: 1}\n"

TEXTS = [name for name in HARMLESS if name.startswith(("text", "message", "raw")) or name == "doc"]
NAMES = ["layout", "set", "space", "format", "field", "buffer", "operation", "argument"]
OTHERS = ["license", "include", "path", "letters", "word", "expression", "type", "part", "config"]

RUN = "__import__('builtins').__dict__.__setitem__('pwned', 1)"
LINES = [  # one line of printable text: what a text may be
    '"',
    "'",
    '"""',
    "'''",
    f'""" {RUN} """',
    f"''' {RUN} '''",
    f'"); {RUN}; ("',
    f"'); {RUN}; ('",
    f'"""; {RUN} #',
    "\\",
    "\\\\",
    '\\"',
    '\\"\\"\\"',
    '\\\\"""',
    "ends with a backslash \\",
    'ends with a quote "',
    f'\\""" + {RUN} + \\"""',
    "\\n and \\x41 and \\u0041 and \\N{BULLET} and \\101",
    "{{ 7 * 7 }} {{ m.doc }} {{ m.__class__ }}",
    "{% for x in y %} {% endif %} {% raw %} {# words #}",
    f"{{{{ {RUN} }}}}",
    "{0} {} {layout} {self.problems} %s %d %(x)s $x ${x}",
    "# noqa # type: ignore # fmt: off",
    "#",
    "}",
    "])",
    "%",
    "- a: [b, {c: d}]",
    "!!python/object/apply:os.system [x]",
    "*alias &anchor <<: x",
    "\N{GRINNING FACE} \u4e2d\u6587\u5b57 \u00e9 \u0001".replace(" \u0001", ""),
    "x" * 114,
    "word " * 22 + "abcd",
    '"' * 114,
    "\\" * 114,
    "\\ " * 56 + ".",
    "\u4e2d " * 56 + "!",
]
REFUSED = [  # texts of more than one line, with characters that are not printed, or too long
    "",
    "\n",
    f"\n{RUN}\n",
    f'"""\n{RUN}\n"""',
    "words\r\nmore words",
    "tab\there",
    "nul\0",
    "escape \x1b[31m red",
    "bell \a, delete \x7f, next line \x85",
    "line \u2028 paragraph \u2029",
    "right to left \u202e, isolate \u2066, pop \u2069",
    "zero width \u200b, mark \u200f, joiner \u2060",
    "byte order mark \ufeff",
    "half a pair \ud800",
    "the other half \udfff",
    "not a byte \udc80",
    "x" * 115,
    "word " * 150,
]


def quote(text: str) -> str:
    """The text as a double-quoted scalar of YAML, all that is not plain ASCII escaped."""

    def escaped(letter: str) -> str:
        if letter in '"\\':
            return f"\\{letter}"
        if letter.isascii() and letter.isprintable():
            return letter
        code = ord(letter)
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

    return f'"{"".join(map(escaped, text))}"'


def compiled(file: str = "thing.yaml", **texts: str) -> Compiled:
    """The spec with some of its texts changed. Other files are only read by the names that a spec may give."""
    data = SPEC.format(**{name: quote(text) for name, text in {**HARMLESS, **texts}.items()})
    folder = file.rpartition("/")[0]
    files = {file: data, "rows.yaml": FRAGMENT, "some.json": '{"fixed": "some words"}'}

    def read(name: str) -> bytes:
        inner = name.removeprefix(f"{folder}/") if folder and name != file else name
        assert inner in files, f"{name!r} was read"
        return files[inner].encode()

    return compile_spec(file, read)


def structure(text: str) -> str:
    """The syntax tree of a module with every string emptied."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


def imported(text: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
    return found


def module_text(made: Compiled) -> str:
    assert made.module is not None, made.problems
    return made.module.text


PLAIN = module_text(compiled())
STRUCTURE, IMPORTS = structure(PLAIN), imported(PLAIN)


@pytest.fixture(autouse=True)
def nothing_runs() -> Iterator[None]:
    """No text has been run when a test is over."""
    yield
    assert not hasattr(builtins, "pwned")


def test_the_attack_would_be_noticed() -> None:
    eval(RUN)
    assert vars(builtins).pop("pwned") == 1
    assert structure('x = "a"\n"b"') == structure('x = ""\n""') != structure('x = "a" + "b"')
    with pytest.raises(AssertionError):
        compiled(include="other.yaml")


def test_modules_import_what_they_need() -> None:
    assert ALLOWED - {"re", "warnings"} <= IMPORTS <= ALLOWED


@pytest.mark.parametrize("text", LINES, ids=lambda text: text[:20].encode("unicode_escape").decode())
def test_texts_change_nothing_but_strings(text: str) -> None:
    """A line in every place that takes a line, all at once."""
    made = compiled(**dict.fromkeys(TEXTS, text))
    assert structure(module_text(made)) == STRUCTURE
    assert imported(module_text(made)) == IMPORTS
    module = made.namespace
    assert module is not None
    full_stop = "" if text.endswith((".", "!", "?")) else "."
    said = ast.get_docstring(ast.parse(module_text(made)), clean=False)
    assert said is not None and " ".join(f"{text}{full_stop}".split()) in " ".join(said.split())
    assert " ".join(text.split()) in " ".join(str(module.Layout.from_config.__doc__).split())
    config = {"num_hidden_layers": 2, "fixed": text, "kinds": [text, "other"], "mode": text}
    assert module.Layout.from_config(config, note=text, named=text).layers("kv") == (0,)
    for broken, choices in (({"mode": "other"}, {}), ({"num_hidden_layers": 60}, {}), ({}, {"named": "other"})):
        with pytest.raises(module.LayoutError) as error:
            module.Layout.from_config({**config, **broken}, **choices)
        layer = "layer 50: " if "num_hidden_layers" in broken else ""
        assert error.value.problems == (f"{layer}{text}",)
        assert str(error.value) == f"thing: {layer}{text}"
    with pytest.raises(module.LayoutError) as error:
        module.Layout.from_config({**config, "fixed": "other words"})
    assert error.value.problems == (f"fixed: this layout is for {text}, found 'other words'",)


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:20].encode("unicode_escape").decode())
def test_texts_that_are_refused(text: str) -> None:
    """In every place that takes a line, each with a problem of its own."""
    made = compiled(**dict.fromkeys(TEXTS, text))
    assert made.module is None
    assert len({problem.primary.span for problem in made.problems}) == len(TEXTS)


@pytest.mark.parametrize("place", [*NAMES, *OTHERS])
def test_hostile_names_paths_words_and_expressions(place: str) -> None:
    """What is no free text has a form of its own, and none of these has it."""
    for text in (*LINES[::6], *REFUSED[:16:5]):
        assert compiled(**{place: text}).failed, text


@pytest.mark.parametrize(
    "text",
    [
        "a.__class__",
        "__import__",
        "__import__('os').system('x')",
        "(lambda: 1)()",
        "open('x')",
        "[x for x in a]",
        "a.b().c",
        "f'{a}'",
        "a if b else c; d",
        "a\nimport os",
        "exec",
        "a, b",
        "a + eval",
        "{a: b}",
        "a := 1",
        "yield",
        "'a' % b",
        "9" * 5000,
        "9 ** 9 ** 9",
        "a." * 200 + "b",
    ],
)
def test_code_in_paths_and_expressions(text: str) -> None:
    """Python that is no expression of the language is refused; a path is never more than a text to look up."""
    assert compiled(expression=text).failed
    made = compiled(path=text)
    if not made.failed:
        plain = compiled(path="text.layers") if "." in text else compiled()
        assert structure(module_text(made)) == structure(module_text(plain))
        assert imported(module_text(made)) == IMPORTS
        assert made.namespace is not None
        with pytest.raises(ValueError, match="num_hidden_layers|is missing"):
            made.namespace.Layout.from_config({"fixed": "some words"})


@pytest.mark.parametrize(
    "paths",
    [
        "a.b + a_b",
        "class / 2",
        "l + 1",
        "max(max, min)",
        "lambda.x * 2",
        "_divide / math",
        "True1 + self",
        "value_0 + value_1",
        "a.b + a_b + value_0",
    ],
)
def test_paths_are_never_names_of_the_module(paths: str) -> None:
    """A value computed from fields of a config works whatever the fields are called."""
    made = compiled(path=paths)
    text = module_text(made)
    assert imported(text) == IMPORTS
    assert made.namespace is not None
    fields: dict[str, object] = {}
    for path in re.findall(r"[A-Za-z_][\w.]*", paths.replace("max(", "(")):
        section = fields
        *parents, last = path.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})  # type: ignore[assignment]
        section[last] = 8
    layout = made.namespace.Layout.from_config({"fixed": "some words", **fields})
    expected = {
        "a.b + a_b": 16,
        "class / 2": 4,
        "l + 1": 9,
        "max(max, min)": 8,
        "lambda.x * 2": 16,
        "_divide / math": 1,
    }
    expected |= {"True1 + self": 16, "value_0 + value_1": 16, "a.b + a_b + value_0": 24}
    assert len(layout.layers("kv")) == expected[paths]


FILES = [
    "thing\n.yaml",
    f"thing\n{RUN}\n#.yaml",
    f"thing\r\n{RUN}.yaml",
    'thing""".yaml',
    "thing\\.yaml",
    "{{ 7 * 7 }}.yaml",
    "{% raw %}.yaml",
    "thing\x1b[31m.yaml",
    "thing\u2028.yaml",
    "thing\u202e.yaml",
    "th\u00efng \u4e2d.yaml",
    "thing\udc80.yaml",
    f"{'long_name_' * 24}.yaml",
    "folder/thing.yaml",
    "fold\ner/thing.yaml",
    f"""folder\n{RUN}/'").yaml""",
]


@pytest.mark.parametrize("file", FILES, ids=lambda text: text[:20].encode("unicode_escape").decode())
def test_file_names(file: str) -> None:
    """The name of a file is in a comment, without its folder and without what is not printed."""
    made = compiled(file)
    text = module_text(made)
    assert structure(text) == STRUCTURE
    head = text.split('"""')[0]
    assert head.isascii() and all(line.startswith("#") for line in head.splitlines())
    assert not re.search(r"[^\n -~]", head)
    assert "fold" not in head
    assert text.encode("utf-8").decode("utf-8") == text


@pytest.mark.parametrize(
    "name",
    [
        "../rows.yaml",
        "/etc/passwd",
        "a/../rows.yaml",
        "./rows.yaml",
        "a//b",
        "",
        ".",
        "..",
        "~/x",
        "C:\\x",
        "rows.yaml\0",
        "$HOME/x",
    ],
)
def test_files_elsewhere_are_never_read(name: str) -> None:
    """`compiled` fails where a file is read by a name that no spec may give."""
    assert compiled(include=name).failed
    assert compiled(config=name).failed
    assert compiled("folder/thing.yaml", include=name).failed


def test_expected_errors_are_compared_as_text() -> None:
    """The text of an expected error is no pattern."""
    for text in ("is missing", "num_hidden_layers is missing from the config"):
        assert not compiled(error=text).failed
    for text in (".*", "is miss.ng", "^", "(?i)IS MISSING", *LINES[::4]):
        assert [problem.code for problem in compiled(error=text).problems] == ["KV303"], text
    for text in REFUSED[::4]:
        assert compiled(error=text).failed


# Names that Python or the generated module has already


NAMED = """\
kvgen: 1
layout: thing
doc: A thing
config:
  num_layers: {{type: int, from: num_hidden_layers}}
  {config}: {{type: int, min: 1}}
choices:
  {choice}: {{type: int, min: 1, default: 3}}
let:
  {let}: {config} + {choice}
  {layered}: {let} if layer < 1 else {config}
require:
  - {{that: {let} > 1, else: too few}}
layers:
  body: num_layers
  sets:
    {set}: layer < {let}
spaces:
  {thing}: {{slots: tokens, page: 16}}
formats:
  {thing}:
    fields: {{{thing}: "u8[{layered}]", other: "u16x[{config}]"}}
    page: [[{thing}], [other]]
buffers:
  {thing}: {{format: {thing}, space: {thing}, layers: {set}}}
""".replace("u16x", "u8")
ROLES = ("config", "choice", "let", "layered", "set", "thing")
NEUTRAL = {role: f"some_{role}" for role in ROLES}


def named(**names: str) -> Compiled:
    return compile_spec("thing.yaml", lambda file: NAMED.format(**{**NEUTRAL, **names}).encode())


def words_of_modules() -> list[str]:
    """Every lower-case name of a generated module, some words of Python, and names that kvgen makes of others."""
    found = {"class", "lambda", "async", "match", "type", "print", "exec", "object", "super", "property"}
    for node in ast.walk(ast.parse(module_text(named()))):
        found |= {str(getattr(node, slot)) for slot in ("id", "arg", "attr", "name") if hasattr(node, slot)}
    found |= {f"page_of_{NEUTRAL['thing']}"}
    found |= {f"{NEUTRAL['thing']}{made}" for made in ("_page", "_page_of", "_space", "_offset")}
    ours = {*NEUTRAL.values(), "num_layers", "num_hidden_layers", "other"}
    return sorted(word for word in found - ours if re.fullmatch("[a-z][a-z0-9_]*", word))


WORDS = words_of_modules()
LANGUAGE = {"true", "false", "null", "if", "else", "in", "is", "and", "or", "not", "layer"}  # no names in expressions


@pytest.mark.parametrize("start", range(8))
def test_names_that_modules_use_are_refused_or_harmless(start: int) -> None:
    """Each word in each role: a problem about that name, or a layout that is the same but for the name."""
    assert len(WORDS) > 130
    for position in range(start, len(WORDS), 8):
        chosen = {role: WORDS[(position + 23 * shift) % len(WORDS)] for shift, role in enumerate(ROLES)}
        chosen = {role: NEUTRAL[role] if word in LANGUAGE else word for role, word in chosen.items()}
        made = named(**chosen)
        for _ in ROLES:  # a name that is refused gives way to another
            if not made.failed:
                break
            refused = {problem.message.split("`")[1] for problem in made.problems if problem.code == "KV241"}
            assert refused & set(chosen.values()), made.problems
            chosen = {role: NEUTRAL[role] if word in refused else word for role, word in chosen.items()}
            made = named(**chosen)
        module = made.namespace
        assert module is not None, made.problems
        layout = module.Layout.from_config({"num_hidden_layers": 9, chosen["config"]: 2}, **{chosen["choice"]: 5})
        assert layout.layers(chosen["thing"]) == tuple(range(7)), chosen
        assert [page.page_bytes for page in layout.buffers[0].pages] == [16 * (7 + 2)] + [16 * (2 + 2)] * 6, chosen
        assert layout.choices[chosen["choice"]] == 5


MADE = """\
kvgen: 1
layout: thing
doc: A thing
config:
  num_hidden_layers: {{type: int}}
  {name}: {{type: int, min: 1}}
let:
  twice: {name} * 2
layers: {{body: num_hidden_layers}}
spaces: {{token: {{slots: tokens, page: 16}}}}
formats:
  row:
    fields: {{k: "u8[{name}]", w: "u8[twice]", v: "u8[{name}]"}}
    page: [[k], [w], {{align: 8}}, {{pad: 2}}, [v], {{align: 4}}]
buffers: {{kv: {{format: row, space: token, layers: layer < {name}}}}}
"""


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("v_offset", "formats.row.fields.v"),
        ("k_offset", "formats.row.fields.k"),
        ("pad_0_offset", "formats.row"),
        ("page_of_kv", "buffers.kv"),
        ("row_page", "formats.row"),
        ("row_page_of", "formats.row"),
        ("token_space", "spaces.token"),
    ],
)
def test_names_that_kvgen_makes_of_others(name: str, path: str) -> None:
    """Refused where they would be made; a page would be laid out by another number otherwise."""
    made = compile_spec("thing.yaml", lambda file: MADE.format(name=name).encode())
    expected = ("KV241", f"`{name}` is what the generated module calls a part of `{path}`")
    assert [(problem.code, problem.message) for problem in made.problems] == [expected]
    other = compile_spec("thing.yaml", lambda file: MADE.format(name=f"x{name}").encode())
    assert other.namespace is not None
    buffer = other.namespace.Layout.from_config({"num_hidden_layers": 9, f"x{name}": 3}).buffers[0]
    assert buffer.layers == (0, 1, 2) and buffer.page.page_bytes == 48 + 96 + 2 + 48 + 2


@pytest.mark.parametrize(
    "name", ["page_bytes", "slots", "held", "read", "rules", "layers", "int", "str", "bool", "math", "len"]
)
def test_names_that_modules_use_themselves(name: str) -> None:
    made = compile_spec("thing.yaml", lambda file: MADE.format(name=name).encode())
    expected = ("KV241", f"`{name}` has a meaning in the generated module")
    assert expected in [(problem.code, problem.message) for problem in made.problems]
