"""Expressions: read as Python reads them, folded and printed to the same values, refused in place."""

import ast
import math
import operator
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path

import pytest

from kvgen.compile import Compiled, compile_spec
from kvgen.expr import (
    FUNCTIONS,
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_HEIGHT,
    Binary,
    Call,
    Conditional,
    Expr,
    Index,
    Literal,
    Name,
    Unary,
    children,
    names,
    parse,
    show,
    walk,
)
from kvgen.fold import FoldError
from kvgen.nodes import Scalar
from kvgen.problems import Problem, Span
from kvgen.scope import Scope, scope_of
from kvgen.spec import load_spec

ROOT = Path(__file__).parent.parent
SOMEWHERE = Span("s.yaml", 1, 1, 1, 1)


def parsed(text: str) -> Expr:
    problems: list[Problem] = []
    expr = parse(Scalar(text, SOMEWHERE, 0), "let.x", problems)
    assert problems == [] and expr is not None, (text, problems)
    return expr


def refusal(text: str) -> Problem:
    problems: list[Problem] = []
    assert parse(Scalar(text, SOMEWHERE, 0), "let.x", problems) is None
    (problem,) = problems
    assert problem.code == "KV201" and problem.path == "let.x"
    return problem


SPEC = """\
kvgen: 1
layout: thing
doc: What expressions are tried in
config:
  num_layers: {{type: int, from: num_hidden_layers}}
  h: {{type: int, min: 1, max: 1000}}
  k: {{type: int, max: 1000}}
  free: {{type: int}}
  fixed: {{type: int, is: 12}}
  ints: {{type: list, of: int}}
  kinds: {{type: list, of: {{full_attention: full, sliding_attention: sliding}}, optional: true}}
  pattern: {{type: text, of: FS, optional: true}}
  maybe: {{type: int, min: 1, optional: true}}
choices:
  word: {{of: [aa, bb], default: aa}}
  flag: {{type: bool, default: true}}
  ratio: {{type: ratio, default: 1/2}}
  above: {{type: ratio, min: 1/8, default: 1/2}}
let:
  used: fixed + h + k + free + len(ints) + (1 if flag else 0) + (1 if ratio < above else 0)
  used_too: "word == 'aa' or has(kinds) or has(pattern) or has(maybe)"
{lets}
require:
  - {{that: used > 2 or used_too, else: never}}
{requires}
layers:
  body: num_layers
  sets:
{sets}
    every: {every}
spaces:
  token: {{slots: tokens, page: 16}}
formats:
  row: {{fields: {{k: "u8[h]"}}, page: [[k]]}}
buffers:
  kv: {{format: row, space: token, layers: every}}
"""


def quote(text: str) -> str:
    """As a double-quoted scalar of YAML."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def spec(lets: Mapping[str, str] = {}, requires: Mapping[str, str] = {}, sets: Mapping[str, str] = {}) -> str:
    """The spec above with more in it. A `requires` is a condition by what it says."""
    every = " or ".join(["layer >= 0", *sets])
    return SPEC.format(
        lets="\n".join(f"  {name}: {quote(text)}" for name, text in lets.items()),
        requires="\n".join(f"  - {{that: {quote(text)}, else: {quote(name)}}}" for name, text in requires.items()),
        sets="\n".join(f"    {name}: {quote(text)}" for name, text in sets.items()),
        every=quote(every),
    )


def compiled(text: str) -> Compiled:
    return compile_spec("s.yaml", lambda file: text.encode())


def scope(text: str) -> Scope:
    loaded = load_spec("s.yaml", lambda file: text.encode())
    assert loaded.spec is not None, loaded.problems
    found, problems = scope_of(loaded.spec)
    assert problems == []
    return found


PLAIN = scope(spec())


# Random expressions, valid in Python too. Numbers are put next to operators without brackets, so that precedence
# decides what they mean; what a bool or a text is, brackets decide.


class Maker:
    """Makes text of random expressions over the names of the spec above."""

    def __init__(self, seed: int, *, is_exact: bool) -> None:
        self.random = random.Random(seed)
        self.is_exact = is_exact  # whether every division comes out whole

    def pick(self, *options: Callable[[], str]) -> str:
        return self.random.choice(options)()

    def number(self, depth: int) -> str:
        if depth == 0:
            return self.pick(
                lambda: str(self.random.randint(0, 12)),
                lambda: self.random.choice(("h", "k", "fixed")),
                lambda: self.random.choice(("h", "k", "len(ints)")),
            )
        inner = depth - 1
        return self.pick(
            lambda: f"{self.number(inner)} + {self.number(inner)}",
            lambda: f"{self.number(inner)} - {self.number(inner)}",
            lambda: f"{self.number(inner)} * {self.number(0)}",
            lambda: f"{self.number(inner)} // {self.divisor()}",
            lambda: f"{self.number(inner)} % {self.divisor()}",
            self.quotient,
            lambda: f"-{self.number(0)}",
            lambda: f"- {self.number(inner)}",
            lambda: f"({self.number(inner)})",
            lambda: f"({self.number(inner)} if {self.bool(inner)} else {self.number(inner)})",
            lambda: (
                f"{self.random.choice(('min', 'max'))}({self.number(inner)}, {self.number(inner)}, {self.number(0)})"
            ),
            lambda: f"{self.random.choice(('lcm', 'gcd'))}({self.number(0)}, {self.divisor()})",
            lambda: f"cdiv({self.number(inner)}, {self.divisor()})",
            lambda: "shard(h * 4, 2)",
            lambda: f"(ints[{self.number(0)} % len(ints)] if len(ints) > 0 else {self.number(0)})",
        )

    def divisor(self) -> str:
        return self.random.choice(("1", "2", "3", "7", "h", "(h + 1)", "fixed"))

    def quotient(self) -> str:
        return f"{self.number(0)} * 6 / 3" if self.is_exact else f"{self.number(0)} / {self.divisor()}"

    def fraction(self) -> str:
        return self.random.choice(
            ("ratio", "0.5", "0.25 * k", "ratio * ratio", "ratio + 0.5", "k / 0.5", "(ratio + k) / 4")
        )

    def bool(self, depth: int) -> str:
        comparison = self.random.choice(("==", "!=", "<", "<=", ">", ">="))
        if depth == 0:
            return self.pick(
                lambda: "flag",
                lambda: "true" if self.random.random() < 0.5 else "false",
                lambda: f"{self.number(0)} {comparison} {self.number(0)}",
                lambda: self.random.choice(("word == 'aa'", "'bb' != word", "has(maybe)")),
            )
        inner = depth - 1
        return self.pick(
            lambda: f"{self.bool(inner)} and {self.bool(inner)}",
            lambda: f"{self.bool(inner)} or {self.bool(inner)}",
            lambda: f"not {self.bool(inner)}",
            lambda: f"({self.bool(inner)})",
            lambda: f"({self.bool(0)}) {self.random.choice(('==', '!='))} ({self.bool(inner)})",
            lambda: f"{self.number(inner)} {comparison} {self.number(inner)}",
            lambda: f"{self.fraction()} {comparison} {self.number(0)}",
            lambda: f"{self.number(inner)} in ints",
            lambda: f"not {self.number(inner)} in ints",
            lambda: f"({self.bool(inner)} if {self.bool(inner)} else {self.bool(0)})",
            lambda: f"(has(maybe) and maybe {comparison} {self.number(inner)})",
            lambda: f"({self.random.choice(('word', 'word', chr(39) + 'aa' + chr(39)))} if flag else 'bb') == word",
        )


class Inexact(Exception):
    """A division of ints that leaves a remainder."""


VALUES: dict[str, object] = {"h": 5, "k": 17, "fixed": 12, "ints": (4, 0, 9), "word": "bb", "flag": False}
VALUES |= {"ratio": Fraction(3, 4), "maybe": None}

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}
OPERATIONS |= {ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt}
OPERATIONS |= {ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}


def in_python(text: str, values: Mapping[str, object]) -> object:
    """What Python's own parser makes of the text, worked out exactly."""

    def work(node: ast.expr) -> object:
        match node:
            case ast.Constant(value=float()):
                return Fraction(ast.unparse(node))
            case ast.Constant():
                return node.value
            case ast.Name(id="true" | "false"):
                return node.id == "true"
            case ast.Name():
                return values[node.id]
            case ast.UnaryOp(op=ast.Not()):
                return not work(node.operand)
            case ast.UnaryOp(op=ast.USub()):
                return -work(node.operand)  # type: ignore[operator]
            case ast.BoolOp(op=ast.And()):
                return all(work(part) for part in node.values)
            case ast.BoolOp():
                return any(work(part) for part in node.values)
            case ast.IfExp():
                return work(node.body if work(node.test) else node.orelse)
            case ast.Subscript():
                return work(node.value)[work(node.slice)]  # type: ignore[index]
            case ast.Compare(ops=[ast.In()]):
                return work(node.left) in work(node.comparators[0])  # type: ignore[operator]
            case ast.Compare(ops=[operation]):
                return OPERATIONS[type(operation)](work(node.left), work(node.comparators[0]))
            case ast.BinOp(op=ast.Div()):
                return divided(work(node.left), work(node.right))
            case ast.BinOp():
                return OPERATIONS[type(node.op)](work(node.left), work(node.right))
            case ast.Call(func=ast.Name(id=function)):
                return called(function, [work(part) for part in node.args])
        raise TypeError(ast.dump(node))

    return work(ast.parse(text, mode="eval").body)


def divided(a: object, b: object) -> object:
    quotient = Fraction(a) / Fraction(b)  # type: ignore[arg-type]
    if isinstance(a, int) and isinstance(b, int):
        if quotient.denominator != 1:
            raise Inexact
        return int(quotient)
    return quotient


def called(function: str, values: list) -> object:
    match function:
        case "cdiv":
            return math.ceil(Fraction(values[0], values[1]))
        case "shard":
            return values[0] // values[1] if values[0] % values[1] == 0 else 1
        case "has":
            return values[0] is not None
    return {"min": min, "max": max, "lcm": math.lcm, "gcd": math.gcd, "len": len}[function](*values)


def known_of(values: Mapping[str, object]) -> dict[str, Literal | None]:
    """The values as folding takes them; lists stay names."""
    return {
        name: None if value is None else Literal(value=value, span=SOMEWHERE)  # type: ignore[arg-type]
        for name, value in values.items()
        if not isinstance(value, tuple)
    }


def folded(text: str, values: Mapping[str, object]) -> object:
    """What folding comes to, with its lists looked up by hand, as nothing folds them."""
    expr = with_lists(parsed(text), values)
    found = PLAIN.fold(expr, known_of(values))
    assert isinstance(found, Literal), show(found)
    return found.value


def with_lists(expr: Expr, values: Mapping[str, object]) -> Expr:
    """`len(ints)`, `x in ints` and `ints[i]` as conditions over their elements."""
    elements = values["ints"]
    assert isinstance(elements, tuple)
    literals = [Literal(value=element, span=expr.span) for element in elements]
    parts = [with_lists(part, values) for part in children(expr)]
    match expr:
        case Call(function="len"):
            return Literal(value=len(elements), span=expr.span)
        case Binary(operator="in"):
            found: Expr = Literal(value=False, span=expr.span)
            for literal in literals:
                same = Binary(operator="==", left=parts[0], right=literal, span=expr.span)
                found = Binary(operator="or", left=found, right=same, span=expr.span)
            return found
        case Index():
            found = literals[0]
            for position, literal in enumerate(literals):
                here = Literal(value=position, span=expr.span)
                same = Binary(operator="==", left=parts[1], right=here, span=expr.span)
                found = Conditional(then=literal, test=same, otherwise=found, span=expr.span)
            return found
        case Unary():
            return Unary(operator=expr.operator, operand=parts[0], span=expr.span)
        case Binary():
            return Binary(operator=expr.operator, left=parts[0], right=parts[1], span=expr.span)
        case Conditional():
            return Conditional(then=parts[0], test=parts[1], otherwise=parts[2], span=expr.span)
        case Call():
            return Call(function=expr.function, arguments=tuple(parts), span=expr.span)
    return expr


@pytest.mark.parametrize("seed", range(8))
def test_precedence_and_values_are_those_of_python(seed: int) -> None:
    maker = Maker(seed, is_exact=False)
    differences = 0
    for _ in range(150):
        text = maker.number(3) if maker.random.random() < 0.5 else maker.bool(3)
        try:
            expected = in_python(text, VALUES)
        except Inexact:
            differences += 1
            with pytest.raises(FoldError, match="leaves a remainder"):
                folded(text, VALUES)
            continue
        found = folded(text, VALUES)
        assert (type(found), found) == (type(expected), expected), text
    assert differences < 50


@pytest.mark.parametrize("seed", range(8))
def test_show_is_read_back_as_the_same(seed: int) -> None:
    """Text of an expression, and of what is left of it when some of its names are known."""
    maker = Maker(seed, is_exact=True)
    for _ in range(150):
        expr = parsed(maker.bool(4))
        assert parsed(show(expr)) == expr, show(expr)
        left = PLAIN.fold(expr, {"k": Literal(value=maker.random.randint(0, 20), span=SOMEWHERE)})
        assert parsed(show(left)) == left, show(left)


def spaced(text: str) -> str:
    return " ".join(text.replace("(", " ( ").replace(")", " ) ").split())


@pytest.mark.parametrize("seed", range(4))
def test_brackets_shown_are_needed(seed: int) -> None:
    """Leaving out any one pair of brackets that `show` prints changes the meaning, or is refused."""
    maker = Maker(seed, is_exact=True)
    for _ in range(40):
        expr = parsed(maker.bool(3))
        text = show(expr)
        for start, letter in enumerate(text):
            if letter != "(" or (start and (text[start - 1].isalnum() or text[start - 1] == "_")):
                continue
            depth, end = 0, start
            for end in range(start, len(text)):
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                if depth == 0:
                    break
            problems: list[Problem] = []
            without = text[:start] + text[start + 1 : end] + text[end + 1 :]
            assert parse(Scalar(without, SOMEWHERE, 0), "", problems) != expr, (text, without)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a+b *c", "a + b * c"),
        ("(a + b)*c", "(a + b) * c"),
        ("((a))", "a"),
        ("a - (b - c)", "a - (b - c)"),
        ("(a - b) - c", "a - b - c"),
        ("- -3", "3"),
        ("-(3)", "-3"),
        ("-a // b", "-a // b"),
        ("-(a // b)", "-(a // b)"),
        ("not (a and b)", "not (a and b)"),
        ("(not a) == b", "(not a) == b"),
        ("(a < b) == (b < c)", "(a < b) == (b < c)"),
        ("not a == b", "not a == b"),
        ("(a if b else c) + 1", "(a if b else c) + 1"),
        ("a if b else (c if d else e)", "a if b else c if d else e"),
        ("(a if b else c) if d else e", "(a if b else c) if d else e"),
        ("a[(b + 1)]", "a[b + 1]"),
        ("min( a,b )", "min(a, b)"),
        ('"word" == a', "'word' == a"),
        ("0.50 * a", "0.5 * a"),
        ("a / 0.125", "a / 0.125"),
        ("1.0", "1.0"),
        ("100.0", "100.0"),
        ("-0.5", "-0.5"),
        ("true", "true"),
    ],
)
def test_shown(text: str, shown: str) -> None:
    assert show(parsed(text)) == shown


@pytest.mark.parametrize(
    ("number", "shown"),
    [(Fraction(1, 3), "1 / 3"), (Fraction(-2, 7), "-2 / 7"), (Fraction(3, 8), "0.375"), (Fraction(-1, 1000), "-0.001")],
)
def test_fractions_shown(number: Fraction, shown: str) -> None:
    assert show(Literal(value=number, span=SOMEWHERE)) == shown
    product = Binary(operator="/", left=parsed("a"), right=Literal(value=number, span=SOMEWHERE), span=SOMEWHERE)
    assert show(product) == (f"a / ({shown})" if " " in shown else f"a / {shown}")


# Values in the module


CONFIG = {"num_hidden_layers": 2, "h": 5, "k": 17, "free": 3, "fixed": 12, "ints": [4, 0, 9]}
CHOICES = {"word": "bb", "flag": False, "ratio": "3/4"}


def literal_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"({value})"


@pytest.mark.parametrize("seed", range(6))
def test_emitted_expressions_have_the_same_values(seed: int) -> None:
    """Each expression is required to have the value that Python's parser gives it, and then not to have it."""
    maker = Maker(100 + seed, is_exact=True)
    texts = [maker.number(3) if position % 2 else maker.bool(3) for position in range(60)]
    expected = [in_python(text, VALUES) for text in texts]
    equal = {
        f"e{position}": f"({text}) == {literal_text(value)}"
        for position, (text, value) in enumerate(zip(texts, expected, strict=True))
    }
    module = compiled(spec(requires=equal)).namespace
    assert module is not None
    assert module.Layout.from_config(CONFIG, **CHOICES).layers("kv") == (0, 1)
    opposite = {name: f"not ({text})" for name, text in equal.items()}
    broken = compiled(spec(requires=opposite))
    assert broken.namespace is not None, broken.problems
    with pytest.raises(broken.namespace.LayoutError) as error:
        broken.namespace.Layout.from_config(CONFIG, **CHOICES)
    assert error.value.problems == tuple(opposite)


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ("1 < h", "h > 1"),
        ("1 <= h", "h >= 1"),
        ("9 > h", "h < 9"),
        ("9 >= h", "h <= 9"),
        ("3 == h", "h == 3"),
        ("3 != h", "h != 3"),
        ("h < k", "h < k"),
        ("not h < k", "h >= k"),
        ("not h <= k", "h > k"),
        ("not h > k", "h <= k"),
        ("not h >= k", "h < k"),
        ("not h == k", "h != k"),
        ("not h != k", "h == k"),
        ("not 3 < h", "h <= 3"),
        ("not h in ints", "h not in ints"),
        ("not has(maybe)", "maybe is None"),
        ("has(maybe) or h > 1", "maybe is not None or h > 1"),
        ("flag == true", "flag"),
        ("flag != true", "not flag"),
        ("false == flag", "not flag"),
        ("not flag == false", "flag"),
        ("not (flag and h > 1)", "not (flag and h > 1)"),
        ("(true if flag else false) or h > 1", "flag or h > 1"),
        ("false if flag else true", "not flag"),
        ("h > 1 if not flag else k > 1", "k > 1 if flag else h > 1"),
        ("-(-h) > 1", "h > 1"),
        ("-(-(h + k)) * 2 > 1", "(h + k) * 2 > 1"),
        ("-(h + k) > 1", "-(h + k) > 1"),
        ("cdiv(h, 3) > 1", "-(-h // 3) > 1"),
        ("cdiv(h + k, 3) > 1", "-(-(h + k) // 3) > 1"),
        ("cdiv(-h, 3) > 1", "-(h // 3) > 1"),
        ("cdiv(-10, h) > 1", "-(10 // h) > 1"),
        ("k - -3 > 1", "k - -3 > 1"),
        ("h / 1 > k", '_divide(h, 1, "h / 1") > k'),
        ("k / 0.5 > h", "k / Fraction(1, 2) > h"),
        ("gcd(h, k) > lcm(h, 2)", "math.gcd(h, k) > math.lcm(h, 2)"),
        ("shard(h, 2) > min(h, 2)", "_shard(h, 2) > min(h, 2)"),
        ("h + (k + 1) > 2 * (h - (k - 1))", "h + (k + 1) > 2 * (h - (k - 1))"),
        ("fixed + 3 > h", "h < 15"),
        ("fixed / 4 + h > 5", "3 + h > 5"),
        ("word == 'bb'", 'word == "bb"'),
        ("flag or fixed == 12", "True"),
        ("flag and fixed == 12", "flag"),
    ],
)
def test_printed(text: str, python: str) -> None:
    """What a condition is in the module: known parts worked out, written as a linter wants it."""
    made = compiled(spec(requires={"words": text}))
    assert made.module is not None, made.problems
    assert f'        read.require({python}, "words")\n' in made.module.text, [
        line for line in made.module.text.split("\n") if '"words"' in line
    ]


def ruff(folder: Path, *command: str) -> str:
    """What ruff has to say about a folder of modules; nothing where it would leave them as they are."""
    line = [sys.executable, "-m", "ruff", *command, "--no-cache", "--config", str(ROOT / "pyproject.toml"), str(folder)]
    done = subprocess.run(line, capture_output=True, text=True, encoding="utf-8")
    return f"{done.stdout}{done.stderr}" if done.returncode else ""


def test_emitted_expressions_are_lint_clean(tmp_path: Path) -> None:
    """However odd an expression is, a linter has nothing to say about its module."""
    for seed in range(4):
        maker = Maker(200 + seed, is_exact=True)
        lets = {f"name_of_a_let_{position}": maker.bool(3 + position % 4) for position in range(25)}
        requires = {f"words about rule {name}": f"{name} or {maker.bool(2)} or {maker.bool(1)}" for name in lets}
        sets = {f"set_{position}": f"layer % 2 == 0 or {maker.bool(position % 5)}" for position in range(15)}
        made = compiled(spec(lets, requires, sets))
        assert made.module is not None, made.problems
        (tmp_path / f"odd_{seed}.py").write_text(made.module.text, encoding="utf-8")
    says_twice = "SIM220,SIM221,SIM222,SIM223"  # `a or not a`, as an author may write
    assert ruff(tmp_path, "check", "--ignore", says_twice) == ""


def test_emitted_expressions_are_formatted(tmp_path: Path) -> None:
    """Long expressions are broken up as a formatter breaks them, short ones are left on one line."""
    for seed in range(4):
        maker = Maker(300 + seed, is_exact=True)

        def many(word: str, count: int, maker: Maker = maker) -> str:
            return word.join(maker.bool(position % 2) for position in range(count))

        lets = {f"let_{position}": many(" and ", 2 + position) for position in range(12)}
        lets |= {f"let_{position}": many(" or ", position - 10) for position in range(12, 24)}
        lets |= {f"let_{position}": f"{many(' and ', 4)} or {many(' and ', 5)} or flag" for position in range(24, 30)}
        lets |= {f"let_{position}": maker.bool(1) for position in range(30, 40)}
        requires = {f"words about rule {name}": f"{name} or {many(' or ', 3)}" for name in lets}
        chained = " else ".join(f"layer > {position} if {maker.bool(1)}" for position in range(6))
        sets = {"first": f"{chained} else false", "second": f"layer > 3 and {many(' and ', 6)}"}
        made = compiled(spec(lets, requires, sets))
        assert made.module is not None, made.problems
        (tmp_path / f"long_{seed}.py").write_text(made.module.text, encoding="utf-8")
    assert ruff(tmp_path, "format", "--diff") == ""


# Refusals

LANGUAGE = "the language has + - * / // % == != < <= > >= in and or not if else [ ] ( )"
NULL = "there is no null in expressions; `has(name)` asks whether an optional name is given"
PLAIN_WORDS = "texts are plain words in single quotes, as in 'full'"
DECIMAL = "write it plainly, as in 64 or 0.5"
NO_LISTS = "expressions have no lists of their own; read one from the config, or compare with `or`"
ALL_FUNCTIONS = "the functions are cdiv, gcd, has, lcm, len, max, min, shard, sizeof"

REFUSALS = [  # text, what is marked, message, help
    ("", (0, 1), "the expression ends where a value was expected", None),
    ("a +", (2, 3), "the expression ends where a value was expected", None),
    ("a b", (2, 3), "`b` stands where an operator or the end was expected", None),
    ("a 1", (2, 3), "`1` stands where an operator or the end was expected", None),
    ("* a", (0, 1), "`*` stands where a value was expected", None),
    ("a + * b", (4, 5), "`*` stands where a value was expected", None),
    ("(a", (1, 2), "the expression ends where `)` was expected", None),
    ("a)", (1, 2), "`)` stands where an operator or the end was expected", None),
    ("()", (1, 2), "`)` stands where a value was expected", None),
    ("a[", (1, 2), "the expression ends where a value was expected", None),
    ("a[1", (2, 3), "the expression ends where `]` was expected", None),
    ("a[1)", (3, 4), "`)` stands where `]` was expected", None),
    ("a if b", (5, 6), "the expression ends where `else` was expected", None),
    ("a if else b", (5, 9), "`else` stands where a value was expected", None),
    ("if a else b", (0, 2), "`if` stands where a value was expected", None),
    ("a else b", (2, 6), "`else` stands where an operator or the end was expected", None),
    ("a == not b", (5, 8), "`not` stands where a value was expected", None),
    ("+a", (0, 1), "`+` stands where a value was expected", None),
    ("min(a", (4, 5), "the expression ends where `)` was expected", None),
    ("min(a b)", (6, 7), "`b` stands where `)` was expected", None),
    ("min(a,)", (6, 7), "`)` stands where a value was expected", None),
    ("a, b", (1, 2), "`,` stands where an operator or the end was expected", None),
    (
        "a < b < c",
        (6, 7),
        "`<` stands where `and`, `or` or the end was expected",
        "comparisons do not chain; join two with `and`",
    ),
    (
        "a == b in c",
        (7, 9),
        "`in` stands where `and`, `or` or the end was expected",
        "comparisons do not chain; join two with `and`",
    ),
    ("a not in b", (2, 5), "`not` stands where an operator or the end was expected", "write `not a in b`"),
    ("a && b", (2, 4), "`&&` is not part of the language", "write `and`"),
    ("a || b", (2, 4), "`||` is not part of the language", "write `or`"),
    ("a ** 2", (2, 4), "`**` is not part of the language", "there are no powers; multiply"),
    ("a = b", (2, 3), "`=` is not part of the language", "write `==`"),
    ("!a", (0, 1), "`!` is not part of the language", "write `not`"),
    ("a ? b", (2, 3), "`?` is not part of the language", "write `a if test else b`"),
    ("True", (0, 4), "`True` is not part of the language", "write `true`"),
    ("a or False", (5, 10), "`False` is not part of the language", "write `false`"),
    ("None", (0, 4), "`None` is not part of the language", NULL),
    ("a == null", (5, 9), "`null` is not part of the language", NULL),
    ("a is b", (2, 4), "`is` is not part of the language", "write `==`"),
    ("a & b", (2, 3), "`&` is not part of the language", LANGUAGE),
    ("a ^ b", (2, 3), "`^` is not part of the language", LANGUAGE),
    ("~a", (0, 1), "`~` is not part of the language", LANGUAGE),
    ("a; b", (1, 2), "`;` is not part of the language", LANGUAGE),
    ("a := b", (2, 3), "`:` is not part of the language", LANGUAGE),
    ("{a}", (0, 1), "`{` is not part of the language", LANGUAGE),
    ("a @ b", (2, 3), "`@` is not part of the language", LANGUAGE),
    ("a $ b", (2, 3), "`$` is not part of the language", LANGUAGE),
    ("a\\n", (1, 2), "`\\` is not part of the language", LANGUAGE),
    ("a # b", (2, 3), "`#` is not part of the language", LANGUAGE),
    ("`a`", (0, 1), "``` is not part of the language", LANGUAGE),
    ("a.b.", (3, 4), "`.` is not part of the language", LANGUAGE),
    (".5", (0, 1), "`.` is not part of the language", LANGUAGE),
    ("h\u00e9ads", (1, 2), "`\u00e9` is not part of the language", LANGUAGE),
    ("\u0663", (0, 1), "`\u0663` is not part of the language", LANGUAGE),
    ("a \u2264 b", (2, 3), "`\u2264` is not part of the language", LANGUAGE),
    ("\u00a0a", (0, 1), "`U+00A0` is not part of the language", LANGUAGE),
    ("a\u00a0", (1, 2), "`U+00A0` is not part of the language", LANGUAGE),
    ("a +\u2003b", (3, 4), "`U+2003` is not part of the language", LANGUAGE),
    ("a\u200bb", (1, 2), "`U+200B` is not part of the language", LANGUAGE),
    ("lambda: 1", (6, 7), "`:` is not part of the language", LANGUAGE),
    ("[1, 2]", (0, 1), "`[` stands where a value was expected", NO_LISTS),
    ("a in [1]", (5, 6), "`[` stands where a value was expected", NO_LISTS),
    ("'a", (0, 2), "text is not closed", PLAIN_WORDS),
    ('"a', (0, 2), "text is not closed", PLAIN_WORDS),
    ("'a\\'", (0, 4), "text with a quote or backslash in it", PLAIN_WORDS),
    ("'a\\n'", (0, 5), "text with a quote or backslash in it", PLAIN_WORDS),
    ("a == 'it\"s'", (5, 11), "text with a quote or backslash in it", PLAIN_WORDS),
    ("'a\u202eb'", (0, 5), "text with a character that cannot be printed", None),
    ("'a\nb'", (0, 5), "text with a character that cannot be printed", None),
    ("0x10", (0, 4), "`0x10` is not a decimal number", DECIMAL),
    ("007", (0, 3), "`007` is not a decimal number", DECIMAL),
    ("1_000", (0, 5), "`1_000` is not a decimal number", DECIMAL),
    ("1e4", (0, 3), "`1e4` is not a decimal number", DECIMAL),
    ("2 * 1e", (4, 6), "`1e` is not a decimal number", DECIMAL),
    ("5.", (0, 2), "`5.` is not a decimal number", DECIMAL),
    ("1.2.3", (0, 5), "`1.2.3` is not a decimal number", DECIMAL),
    ("3heads", (0, 6), "`3heads` is not a decimal number", DECIMAL),
    ("9223372036854775808", (0, 19), "number too large; the limit is 2^63 - 1", None),
    ("1 + 9223372036854775807.5", (4, 25), "number too large; the limit is 2^63 - 1", None),
    ("9" * 900, (0, 900), "number too large; the limit is 2^63 - 1", None),
    ("0." + "3" * 40, (0, 42), "number too large; the limit is 2^63 - 1", None),
    ("eval(a)", (0, 4), "unknown function `eval`", ALL_FUNCTIONS),
    ("a.b(1)", (0, 3), "unknown function `a.b`", ALL_FUNCTIONS),
    ("__import__(a)", (0, 10), "unknown function `__import__`", ALL_FUNCTIONS),
    ("len()", (0, 5), "`len` takes 1 argument, not 0", None),
    ("len(a, b)", (0, 9), "`len` takes 1 argument, not 2", None),
    ("1 + lcm(a)", (4, 10), "`lcm` takes 2 to 8 arguments, not 1", None),
    ("max(1, 2, 3, 4, 5, 6, 7, 8, 9)", (0, 30), "`max` takes 1 to 8 arguments, not 9", None),
    ("cdiv(a)", (0, 7), "`cdiv` takes 2 arguments, not 1", None),
    ("sizeof(a, b, c)", (0, 15), "`sizeof` takes 2 arguments, not 3", None),
]


@pytest.mark.parametrize(("text", "place", "message", "help"), REFUSALS, ids=lambda value: str(value)[:20])
def test_refusals(text: str, place: tuple[int, int], message: str, help: str | None) -> None:
    problem = refusal(text)
    span = problem.primary.span
    assert (problem.message, problem.help) == (message, help)
    assert (span.line, span.column - 1, span.end_column - 1) == (1, *place)


def test_every_function_counts_its_arguments() -> None:
    for name, (least, most) in FUNCTIONS.items():
        for count in range(11):
            problems: list[Problem] = []
            text = f"{name}({', '.join('abcdefghijk'[:count])})"
            assert (parse(Scalar(text, SOMEWHERE, 0), "", problems) is not None) == (least <= count <= most), text


# Limits


def test_length() -> None:
    """1,000 characters are read, one more is not."""
    assert MAX_CHARACTERS == 1_000
    long = "a" * 1_000
    assert parsed(long) == Name(name=long, span=SOMEWHERE)
    problem = refusal(long + "a")
    assert problem.message == "expression of 1,001 characters; the limit is 1,000"
    assert problem.help == "name its parts under `let`"


@pytest.mark.parametrize(
    ("opening", "middle", "closing"),
    [
        ("(", "a", ")"),
        ("min(b, ", "a", ")"),
        ("a[", "a", "]"),
        ("not ", "a", ""),
        ("- ", "a", ""),
        ("a if b else ", "a", ""),
    ],
)
def test_depth(opening: str, middle: str, closing: str) -> None:
    """32 levels are read, 33 are not, and more never cost the parser its stack."""
    assert MAX_DEPTH == 32
    parsed(opening * 32 + middle + closing * 32)
    for depth in (33, 60):
        problem = refusal(opening * depth + middle + closing * depth)
        assert problem.message == "expression nested over 32 deep"
        assert problem.help == "name its parts under `let`"


@pytest.mark.parametrize(
    "text", ["(" * 1_000, "[" * 1_000, "not " * 249, "-" * 1_000, "a[" * 499, "min(" * 249, "(" * 500 + ")" * 500]
)
def test_deep_brackets_are_refused_before_they_are_followed(text: str) -> None:
    assert refusal(text).code == "KV201"


def test_height() -> None:
    """A sum of 128 parts has a tree that is 128 high; one more part is too many."""
    assert MAX_HEIGHT == 128
    assert len(list(walk(parsed(" + ".join("a" * 128))))) == 255
    for text in (" + ".join("a" * 129), "a" + "[0]" * 128, " and ".join("a" * 150)):
        problem = refusal(text)
        assert problem.message == "expression with too many parts"
        assert problem.help == "name its parts under `let`"
        assert problem.primary.span.end_column == len(text) + 1


def test_names() -> None:
    assert names(parsed("a + min(b, c[d]) if e.f == 'g' else sizeof(h, 2)")) == {"a", "b", "c", "d", "e.f", "h"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [(7, 7), (-7, -7), (Fraction(1, 10_000), Fraction(1, 10_000)), (True, True)],
)
def test_numbers_and_booleans_are_themselves(value: object, expected: object) -> None:
    problems: list[Problem] = []
    assert parse(Scalar(value, SOMEWHERE), "", problems) == Literal(value=expected, span=SOMEWHERE)  # type: ignore[arg-type]
    assert problems == []


def test_null_is_no_expression() -> None:
    problems: list[Problem] = []
    assert parse(Scalar(None, SOMEWHERE), "let.x", problems) is None
    assert [problem.message for problem in problems] == ["an expression is missing"]


def test_one_and_true_differ() -> None:
    assert parsed("1") != parsed("true") and parsed("0") != parsed("false")
    assert len({parsed("1"), parsed("true"), parsed("1.0")}) == 3


# Places: what is marked, in every way to write a scalar


def marked(text: str, problem: Problem) -> str:
    """The part of a file that a problem is about."""
    span = problem.primary.span
    assert span.line == span.end_line
    return text.split("\n")[span.line - 1][span.column - 1 : span.end_column - 1]


@pytest.mark.parametrize(
    ("scalar", "expected"),
    [
        ("h + nothing * 2", "nothing"),
        ("  h + nothing", "nothing"),
        ("'h + nothing * 2'", "nothing"),
        ('"h + nothing * 2"', "nothing"),
        ('"h +  nothing"', "nothing"),
        ("h + (nothing)", "nothing"),
        ("h + nothing   # words", "nothing"),
        ("h + len(nothing)", "nothing"),
        ("nothing", "nothing"),
        ("\"h + nothing == 'x'\"", "nothing"),
        ("min(h, -(1 + used_too))", "used_too"),
        ("h + (k if word else 2)", "word"),
        ("h // (k + 0)", "k + 0"),
        ("h + 3 % (2 - 2)", "2 - 2"),
        ("ints[h - 1]", "ints[h - 1]"),
        ("2 * (pattern == 'F')", "pattern"),
        ('"h +\\x20nothing"', '"h +\\x20nothing"'),  # an escape moves the text: the whole scalar
    ],
)
def test_marks(scalar: str, expected: str) -> None:
    text = spec().replace("let:\n", f"let:\n  tried: {scalar}\n").replace("used > 2", "used + tried > 2")
    problems = [problem for problem in compiled(text).problems if problem.code != "KV305"]
    assert [marked(text, problem) for problem in problems[:1]] == [expected], problems


def test_marks_in_types_and_pieces() -> None:
    text = spec().replace('"u8[h]"', '"u8[ h , h//nothing ]"')
    (problem,) = compiled(text).problems
    assert (problem.message, marked(text, problem)) == ("unknown name `nothing`", "nothing")
    text = spec().replace('"u8[h]"', "'u8[h+1]'")
    (problem,) = compiled(text).problems
    assert (problem.message, marked(text, problem)) == ("`h + 1` is not an axis", "h+1")


# Types


GUARDED = "has(pattern) and layer < len(pattern) and pattern[layer] == 'F'"

TYPES = [  # a let, its problem: code, message, what is marked, help
    ("h + true", "KV212", "expected a number, found a bool", "true"),
    ("h + word", "KV212", "expected a number, found a text", "word"),
    ("ints + 1", "KV212", "expected a number, found a list", "ints"),
    ("-flag", "KV212", "expected a number, found a bool", "flag"),
    ("not h", "KV212", "expected a bool, found an int", "h"),
    ("flag and h", "KV212", "expected a bool, found an int", "h"),
    ("word or flag", "KV212", "expected a bool, found a text", "word"),
    ("1 if h else 2", "KV212", "expected a bool, found an int", "h"),
    ("h < flag", "KV212", "expected a number, found a bool", "flag"),
    ("word < 'aa'", "KV212", "expected a number, found a text", "word"),
    ("h == 'aa'", "KV212", "an int is compared with a text", "h == 'aa'"),
    ("flag == 1", "KV212", "a bool is compared with an int", "flag == 1"),
    ("ints == ints", "KV212", "lists are not compared", "ints == ints"),
    ("h in word", "KV212", "expected a list, found a text", "word"),
    ("word in ints", "KV212", "a text is compared with an int", "word in ints"),
    ("word == 'ab'", "KV212", "`ab` is never a value here", "'ab'"),
    ("'ab' != word", "KV212", "`ab` is never a value here", "'ab'"),
    ("has(kinds) and 0 < len(kinds) and kinds[0] == 'ful'", "KV212", "`ful` is never a value here", "'ful'"),
    ("h[0]", "KV212", "expected a list, found an int", "h"),
    ("word[0]", "KV212", "expected a list, found a text", "word"),
    ("ints[flag]", "KV212", "expected an int, found a bool", "flag"),
    ("len(h)", "KV212", "expected a list, found an int", "h"),
    ("min(h, flag)", "KV212", "expected a number, found a bool", "flag"),
    ("cdiv(ratio, 2)", "KV212", "expected an int, found a ratio", "ratio"),
    ("gcd(h, 0.5)", "KV212", "expected an int, found a ratio", "0.5"),
    ("1 if flag else word", "KV212", "one value is an int, the other a text", "1 if flag else word"),
    ("ints if flag else ints", "KV212", "one value is a list, the other a list", "ints if flag else ints"),
    ("has(1)", "KV212", "`has` asks about a name, not about `1`", "1"),
    ("has(h + 1)", "KV212", "`has` asks about a name, not about `h + 1`", "h + 1"),
    ("ratio // 2", "KV212", "`//` is for ints, and one side is a ratio", "ratio // 2"),
    ("h % 0.5", "KV212", "`%` is for ints, and one side is a ratio", "h % 0.5"),
    ("sizeof(row, flag)", "KV212", "expected an int, found a bool", "flag"),
    ("heds + 1", "KV210", "unknown name `heds`", "heds"),
    ("sizeof(rows, 1)", "KV210", "unknown format `rows`", "rows"),
    ("row + 1", "KV210", "unknown name `row`", "row"),
    ("has(kindz)", "KV210", "unknown name `kindz`", "kindz"),
    ("a.b + 1", "KV210", "unknown name `a.b`", "a.b"),
    ("tokens * 2", "KV211", "`tokens` has no value here", "tokens"),
    ("requests", "KV211", "`requests` has no value here", "requests"),
    ("offset", "KV211", "`offset` has no value here", "offset"),
    ("maybe + 1", "KV213", "`maybe` is optional and may be absent here", "maybe"),
    ("len(kinds)", "KV213", "`kinds` is optional and may be absent here", "kinds"),
    ("has(h)", "KV213", "`h` is never absent", "h"),
    ("ints[0]", "KV214", "`ints[0]` may lie outside the list", "ints[0]"),
    ("ints[h]", "KV214", "`ints[h]` may lie outside the list", "ints[h]"),
    ("h // k", "KV215", "`k` is a divisor and may be 0 or less", "k"),
    ("h % k", "KV215", "`k` is a divisor and may be 0 or less", "k"),
    ("h / k", "KV215", "`k` is a divisor and may be 0 or less", "k"),
    ("h / ratio", "KV215", "`ratio` is a divisor and may be 0 or less", "ratio"),
    ("h / (above - ratio)", "KV215", "`above - ratio` is a divisor and may be 0 or less", "above - ratio"),
    ("h // (h - 1)", "KV215", "`h - 1` is a divisor and may be 0 or less", "h - 1"),
    ("h // 0", "KV215", "division by 0", "0"),
    ("h % -2", "KV215", "division by -2", "-2"),
    ("cdiv(h, k)", "KV215", "`k` is a divisor and may be 0 or less", "k"),
    ("shard(h, k)", "KV215", "`k` is a divisor and may be 0 or less", "k"),
    ("h % len(ints)", "KV215", "`len(ints)` is a divisor and may be 0 or less", "len(ints)"),
    (
        "10 // (0 - cdiv(-10, h) - 5)",
        "KV215",
        "`0 - cdiv(-10, h) - 5` is a divisor and may be 0 or less",
        "0 - cdiv(-10, h) - 5",
    ),
    (
        "10 // (4 - lcm(0 - h, 1))",
        "KV215",
        "`4 - lcm(0 - h, 1)` is a divisor and may be 0 or less",
        "4 - lcm(0 - h, 1)",
    ),
    ("7 / 2", "KV217", "7 / 2 leaves a remainder", "7 / 2"),
    ("fixed / 5 + h", "KV217", "12 / 5 leaves a remainder", "fixed / 5"),
    ("shard(6, 4)", "KV217", "6 heads cannot be divided over 4 ranks", "shard(6, 4)"),
]


@pytest.mark.parametrize(("text", "code", "message", "part"), TYPES, ids=lambda value: str(value)[:24])
def test_types(text: str, code: str, message: str, part: str) -> None:
    made = spec({"tried": text}, requires={"words": "tried == tried"})
    problems = [problem for problem in compiled(made).problems if problem.code != "KV305"]
    assert [(problem.code, problem.message) for problem in problems[:1]] == [(code, message)], problems
    assert marked(made, problems[0]) == part
    assert problems[0].path.startswith("let.tried")


FINE = [  # lets that are well typed, each near a refusal above
    "h + 1 // 1",
    "k // h",
    "k // (h + k)",
    "k % (k + 1)",
    "k / 1",
    "h // max(k, 1)",
    "h // (k * k + 1)",
    "h // min(h, 3)",
    "h // gcd(h, k)",
    "h // lcm(h, 4)",
    "h // cdiv(h, 2)",
    "h // shard(h * 8, 8)",
    "h // (1 if flag else 2)",
    "h / above",
    "h / (above + ratio)",
    "k > 0 and h // k > 1",
    "k < 1 or h % k == 0",
    "h // k if k >= 1 else 2",
    "2 if k <= 0 else cdiv(h, k)",
    "ratio > 0 and h / ratio > 1",
    "free - h > 0 and k // (free - h) > 1",
    "0.5 * 2 / 4",
    "(ratio if flag else 1) / 3",
    "maybe if has(maybe) else 3",
    "3 if not has(maybe) else maybe",
    "has(maybe) and maybe > 1",
    "not has(maybe) or maybe > 1",
    "has(maybe) and has(kinds) and maybe < len(kinds)",
    "(has(maybe) and flag) and maybe > 2",
    "ints[0] if len(ints) > 0 else 0",
    "ints[2] if len(ints) >= 3 else 0",
    "ints[2] if len(ints) == 3 else 0",
    "ints[1] if 1 < len(ints) else 0",
    "0 if len(ints) < 2 else ints[1]",
    "0 if not len(ints) > 1 else ints[1]",
    "len(ints) > 3 and ints[3] == 4",
    "len(ints) <= 3 or ints[3] == 4",
    "k < len(ints) and ints[k] == 4",
    "ints[k % len(ints)] if len(ints) > 0 else 0",
    "h + k < len(ints) and ints[h + k] > 0",
    "h in ints",
    "has(kinds) and 'full' in kinds",
    "word == 'aa'",
    "(word if flag else 'aa') == 'bb'",
    "has(pattern) and 0 < len(pattern) and pattern[0] == 'F'",
    "has(pattern) and pattern == 'FFS'",
    "sizeof(row, 3) + sizeof(row, h)",
    "-7 % 3 + -7 // 2",
    "12 / 4",
    "fixed / 4 / 3",
]


@pytest.mark.parametrize("text", FINE)
def test_well_typed(text: str) -> None:
    made = compiled(spec({"tried": text}, requires={"words": "tried == tried"}))
    assert made.namespace is not None, made.problems


NOT_INSIDE = [  # near misses of the guards above
    "ints[1] if len(ints) > 0 else 0",
    "ints[2] if len(ints) >= 2 else 0",
    "0 if len(ints) < 1 else ints[1]",
    "len(ints) > 3 or ints[3] == 4",
    "ints[k] == 4 and k < len(ints)",
    "k <= len(ints) and ints[k] == 4",
    "ints[k + 1] == 4 if k < len(ints) else flag",
    "(k < len(ints) or flag) and ints[k] == 4",
    "not k < len(ints) and ints[k] == 4",
    "k - 1 < len(ints) and ints[k - 1] == 4",
]


@pytest.mark.parametrize(
    "text",
    [
        "k >= 0 and h // k > 1",
        "h // k > 1 and k > 0",
        "k < 1 and h // k > 1",
        "ratio >= 0 and h / ratio > 1",
        "k > 0 and h // (k - 1) > 1",
    ],
)
def test_guards_that_do_not_make_a_divisor_safe(text: str) -> None:
    problems = compiled(spec({"tried": text}, requires={"words": "tried == tried"})).problems
    assert "KV215" in {problem.code for problem in problems}, problems


@pytest.mark.parametrize("text", NOT_INSIDE)
def test_guards_that_do_not_suffice(text: str) -> None:
    problems = compiled(spec({"tried": text}, requires={"words": "tried == tried"})).problems
    assert "KV214" in {problem.code for problem in problems}, problems


@pytest.mark.parametrize(
    "text",
    [
        "maybe > 1 and has(maybe)",
        "has(maybe) or maybe > 1",
        "maybe if not has(maybe) else 3",
        "has(kinds) and maybe > 1",
    ],
)
def test_names_that_may_be_absent(text: str) -> None:
    problems = compiled(spec({"tried": text}, requires={"words": "tried == tried"})).problems
    assert "KV213" in {problem.code for problem in problems}, problems


# What `require` makes certain

LAYER = "ints[layer] > 0 and layer >= 0"


@pytest.mark.parametrize(
    ("requires", "set"),
    [
        ("len(ints) >= num_layers", LAYER),
        ("num_layers <= len(ints)", LAYER),
        ("len(ints) == num_layers", LAYER),
        ("num_layers == len(ints) and h > 2", LAYER),
        ("not len(ints) < num_layers", LAYER),
        ("len(ints) > 3", "ints[3] > layer"),
        ("not has(pattern) or len(pattern) >= num_layers", "has(pattern) and pattern[layer] == 'F'"),
        ("h < 3 or len(ints) > 5", "h >= 3 and ints[5] > layer"),
        ("flag or len(ints) > 5", "not flag and ints[5] > layer"),
        ("not flag or len(ints) > 5", "flag and ints[5] > layer"),
        ("word != 'aa' or len(ints) > 5", "word == 'aa' and ints[5] > layer"),
    ],
)
def test_requirements_that_make_an_index_safe(requires: str, set: str) -> None:
    made = compiled(spec(requires={"words": requires}, sets={"tried": set}))
    assert made.namespace is not None, made.problems


@pytest.mark.parametrize(
    ("requires", "set"),
    [
        ("h > 1", LAYER),
        ("len(ints) + 1 >= num_layers", LAYER),
        ("len(ints) >= h", LAYER),
        ("len(ints) >= num_layers or flag", LAYER),
        ("len(ints) > 3", "ints[4] > layer"),
        ("has(pattern) or len(ints) >= num_layers", LAYER),
        ("not has(pattern) or len(ints) > 5", "ints[5] > layer"),
        ("word == 'aa' or len(ints) > 5", "ints[5] > layer"),
        ("word == 'aa' or len(ints) > 5", "word == 'bb' and ints[5] > layer"),
        ("word != 'aa' or len(ints) > 5", "ints[5] > layer"),
        ("(flag and h > 2) or len(ints) > 5", "ints[5] > layer"),
        ("(flag and h > 2) or len(ints) > 5", "not flag and ints[5] > layer"),
        ("h == 3 or len(ints) > 5", "ints[5] > layer"),
        ("has(maybe) or len(ints) > 5", "ints[5] > layer"),
    ],
)
def test_requirements_that_do_not(requires: str, set: str) -> None:
    problems = compiled(spec(requires={"words": requires}, sets={"tried": set})).problems
    assert {problem.code for problem in problems if problem.code != "KV305"} == {"KV214"}, problems


def test_draft_layers_are_not_covered_by_the_body() -> None:
    """A list as long as the body is safe for the body alone."""
    requires, draft = {"words": "len(ints) >= num_layers"}, "  body: num_layers\n  draft: k"
    with_draft = spec(requires=requires, sets={"tried": LAYER}).replace("  body: num_layers", draft)
    assert "KV214" in {problem.code for problem in compiled(with_draft).problems}
    for guarded in (f"body and {LAYER}", f"draft or {LAYER}", f"not draft and {LAYER}"):
        made = compiled(spec(requires=requires, sets={"tried": guarded}).replace("  body: num_layers", draft))
        assert made.namespace is not None, made.problems


def test_a_let_over_layers_has_no_value_elsewhere() -> None:
    lets = {"tried": "layer * 2", "other": "tried + 1"}
    (problem,) = [
        problem
        for problem in compiled(
            spec(lets, {"words": "h > 1"}, {"s": "other > 3"}).replace("page: 16", "page: other")
        ).problems
        if problem.code != "KV305"
    ]
    assert (problem.code, problem.message) == ("KV211", "`other` depends on the layer, which has no value here")


# Magnitudes


def test_numbers_grow_to_256_bits_and_no_further() -> None:
    """`free` is at most 2^40, so six factors and a seventh of 2^16 come to 2^256; a factor of 2 more is too much."""
    six = " * ".join(["free"] * 6)
    assert compiled(spec({"tried": f"{six} * 65536"}, {"words": "tried > 1"})).namespace is not None
    for text in (
        f"{six} * 131072",
        f"0 - {six} * 131072",
        f"{six} * 65536 + 1",
        f"lcm(free, {', '.join(['free'] * 6)})",
    ):
        (problem,) = compiled(spec({"tried": text}, {"words": "tried > 1"})).problems
        assert problem.code == "KV216" and problem.message.endswith("may grow beyond 256 bits"), problem
        assert problem.help == "state a `max` for what it is made of"


def test_a_number_that_grows_through_lets_costs_nothing() -> None:
    """Each let squares the one before it; the first that is too large is refused, and nothing works the others out."""
    largest = {"a0": "9223372036854775807"} | {
        f"a{position}": f"a{position - 1} * a{position - 1}" for position in range(1, 90)
    }
    (problem,) = compiled(spec(largest, {"words": "a89 > 1"})).problems
    assert (problem.code, problem.message) == ("KV216", "`a2 * a2` may grow beyond 256 bits")
    fraction = {**largest, "a0": "0.123456789"}
    (problem,) = compiled(spec(fraction, {"words": "a89 > 1"})).problems
    assert (problem.code, problem.message) == ("KV216", "`a6 * a6` may have too many digits")


def test_lets_that_share_lets_are_worked_out_once() -> None:
    """Ninety lets, each the sum of the one before it with itself, under a choice that is tried out."""
    lets = {"a0": "h if word == 'aa' else k"} | {
        f"a{position}": f"(a{position - 1} + a{position - 1}) % 7" for position in range(1, 90)
    }
    made = compiled(spec(lets, {"words": "word == 'aa' or a89 >= 0"}))
    assert made.namespace is not None, made.problems


def test_ratios_stay_ratios() -> None:
    """A ratio that happens to be whole is still divided as one."""
    lets = {"one": "0.5 * 2", "tried": "one / 4", "other": "(ratio + ratio) / 3"}
    made = compiled(spec(lets, {"words": "tried == 0.25 and other * 3 == ratio * 2"}))
    assert made.namespace is not None, made.problems
    assert made.namespace.Layout.from_config(CONFIG, ratio="1/2").layers("kv") == (0, 1)


@pytest.mark.parametrize(
    ("heads", "ranks", "own"), [(8, 1, 8), (8, 4, 2), (8, 8, 1), (4, 8, 1), (1, 64, 1), (6, 18, 1)]
)
def test_shard_of_numbers(heads: int, ranks: int, own: int) -> None:
    """Folded at build: a rank has its part of the heads, or one that others have too."""
    made = compiled(
        spec({"tried": f"shard({heads}, {ranks})"}, {"words": f"tried == {own}"}).replace("u8[h]", "u8[tried]")
    )
    assert made.layout is not None and made.namespace is not None, made.problems
    (page,) = made.layout.pages
    assert page.page_bytes.known == 16 * own
    made.namespace.Layout.from_config(CONFIG)  # the `require` holds


BOUNDS = [  # a divisor, and whether it may be 0 or less, for h from 1 to 1,000, k from 0 and numbers in between
    ("cdiv(0 - h, 2) + 501", False),  # -500 at least
    ("cdiv(0 - h, 2) + 500", True),
    ("cdiv(0 - 9, min(h, 3)) + 10", False),  # -9 to -3
    ("cdiv(0 - 9, min(h, 3)) + 9", True),
    ("0 - 2 - cdiv(0 - 9, min(h, 3))", False),
    ("0 - 3 - cdiv(0 - 9, min(h, 3))", True),
    ("1 - cdiv(k - 1000, min(h, 3))", False),  # from -1,000 to 0
    ("0 - cdiv(k - 1000, min(h, 3))", True),
    ("cdiv(k - 1000, min(h, 3)) + 1001", False),
    ("cdiv(k - 1000, min(h, 3)) + 1000", True),
    ("cdiv(9, min(h, 3)) - 2", False),  # 3 to 9
    ("cdiv(9, min(h, 3)) - 3", True),
    ("10 - cdiv(9, min(h, 3))", False),
    ("9 - cdiv(9, min(h, 3))", True),
    ("gcd(h, k)", False),
    ("gcd(k, 2 * k)", True),  # of 0 and 0 it is 0
    ("gcd(k, free)", True),
    ("gcd(k, 4)", False),
    ("gcd(k, 0)", True),
    ("1001 - gcd(h, k)", False),
    ("1000 - gcd(h, k)", True),
]


@pytest.mark.parametrize(("divisor", "may_be_0"), BOUNDS)
def test_bounds_of_divisors(divisor: str, may_be_0: bool) -> None:
    problems = compiled(spec({"tried": f"7 // ({divisor})"}, {"words": "tried == tried"})).problems
    assert [problem.code for problem in problems] == ["KV215"] * may_be_0, problems
