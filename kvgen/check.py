"""The rules of the language: one function each, all problems at once.

`check_spec` types every name first (scope.py), then runs CHECKS in order. The rules about pages are in placing.py,
which this pass and the next one use; here they are only collected.
"""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction

from kvgen.cases import try_cases
from kvgen.expr import Binary, Call, Expr, Literal, Name, Unary, children, names, show, walk
from kvgen.facts import NOTHING, Place
from kvgen.fold import FoldError
from kvgen.owners import always_shared, first_layers, shared_layers
from kvgen.page import BYTE, Page
from kvgen.placing import fields_of, resolve_page
from kvgen.problems import Label, Problem
from kvgen.scope import Scope, names_of_format, scope_of, type_cases
from kvgen.size import Size
from kvgen.space import affine, page_sizes, page_slots
from kvgen.spec import (
    KERNEL_VERBS,
    WHOLE_POOL_VERBS,
    Buffer,
    Derived,
    Field,
    Format,
    Gap,
    Ident,
    Include,
    Operation,
    Parameter,
    Part,
    Plane,
    Root,
    Space,
    Spec,
)
from kvgen.types import (
    DERIVED_SLOTS_MAX,
    DTYPES,
    PARAMETER_MAX,
    WORDS_OF_THE_LANGUAGE,
    Bool,
    Int,
    Ratio,
    Type,
    closest,
    suggest,
)
from kvgen.walk import fields_or_default, side_by_side, unsupported

CODES = {
    "KV240": "a name defined twice",
    "KV241": "a name that generated code cannot have",
    "KV242": "a name that is never used",
    "KV243": "a reference to nothing",
    "KV244": "a reference that leads back to itself",
    "KV245": "a parameter whose values contradict each other",
    "KV246": "a fragment whose needs are not met",
    "KV247": "cases that leave something out, or that nothing reaches",
    "KV248": "a space that cannot be",
    "KV249": "a buffer that cannot be",
    "KV250": "an operation that does not fit its buffers",
    "KV251": "a source in a config that is no path and no arithmetic over paths",
    "KV252": "a field of a config that is read and ignored",
    "KV253": "a license that is not an SPDX expression",
}

ALL_SLOTS = Size.of("slots")
CASES_MAX = 64  # of a name, with those of the names it stands for
TAKEN = frozenset(  # names that `from_config` and the layout class use themselves
    [
        "cls",
        "config",
        "choices",
        "read",
        "rules",
        "layers",
        "held",
        "layer",
        "self",
        "buffer",
        "buffers",
        "spaces",
        "granule",
        "owner",
        "fingerprint",
        "page_fingerprint",
        "config_used",
        "defaults_used",
        "config_items",
        "shards",
        "default_items",
        "device_buffers",
        "from_config",
        "num_body_layers",
        "notes",
        "slots",
        "page",
        "cell_size",
        "bytes_for",
        "host_bytes_for",
        "max_tokens",
        "max_requests",
        "page_bytes",
        "int",
        "str",
        "bool",
        "min",
        "max",
        "len",
        "math",
        "tuple",
        "set",
        "range",
        "sum",
        "has",
        "cdiv",
        "lcm",
        "gcd",
        "shard",
        "sizeof",
        "replace",
        "lru_cache",
    ]
)
POOL_NAMES = frozenset(
    [
        "layout",
        "tokens",
        "requests",
        "device",
        "backend",
        "buffer",
        "num_bytes",
        "aux_bytes",
        "warmup",
        "clear_pages",
        "describe_staging",
        "transfer_regions",
        "pack",
        "unpack",
        "move",
        "save",
        "restore",
    ]
)
OTHER_PYTHONS = """
    aifc annotationlib asynchat asyncore audioop cgi cgitb chunk compression crypt distutils imghdr imp lib2to3 mailcap
    msilib nis nntplib ossaudiodev pipes smtpd sndhdr spwd sunau telnetlib uu xdrlib
"""  # modules of the standard library of 3.11 to 3.14 that not all of these have
PACKAGES = """
    accelerate aiohttp aiter amdsmi attr attrs certifi charset_normalizer cuda cupy cutlass deep_ep deep_gemm diffusers
    einops fastapi filelock flash_attn flash_attn_interface flash_mla flashinfer fsspec functorch generated
    huggingface_hub hypothesis jinja2 jsonschema kvgen lmcache
    markupsafe mooncake mpmath msgspec networkx nixl numba numpy nvidia orjson outlines packaging pandas pip
    pkg_resources pluggy prometheus_client psutil pybind11 pydantic pynvml pytest ray regex requests safetensors scipy
    setuptools sgl_kernel sglang sympy tensorrt_llm test tests tilelang tokenizers torch torchao torchaudio torchgen
    torchvision tqdm transformers triton typing_extensions urllib3 uvicorn uvloop vllm wheel xdist xformers xgrammar
    yaml zmq
"""  # what servers and their tests import beside a module
HIDDEN = frozenset([*sys.stdlib_module_names, *OTHER_PYTHONS.split(), *PACKAGES.split()])
RUN_BY_NAME = frozenset(["conftest", "setup", "sitecustomize", "usercustomize"])
DEVICES = frozenset(  # of Windows, in every folder and with every ending
    ["aux", "con", "nul", "prn", *(f"{port}{number}" for port in ("com", "lpt") for number in range(10))]
)
SOFT_WORDS = frozenset(["case", "match", "type"])  # of Python, by their place; `keyword` of 3.11 lacks one
ARGUMENTS_TAKEN = ("self", "layer_id", "loc", "skip_reserved")
LOCALS_OF_OPERATIONS = ("entry", "slots", "first_slot", "own", "self", "torch", "len")


def check_spec(spec: Spec) -> tuple[Scope, list[Problem]]:
    """The scope of a spec and everything that is wrong with it."""
    scope, problems = scope_of(spec)
    for check in CHECKS:
        problems += check(spec, scope)
    unmet = {label.span.file for problem in problems if problem.code == "KV246" for label in problem.secondary}
    # a fragment without what it needs is judged no further
    kept = [item for item in problems if item.primary.span.file not in unmet or item.code == "KV240"]
    return scope, list(dict.fromkeys(kept))


def check_defined_once(spec: Spec, scope: Scope) -> Iterator[Problem]:
    """KV240: every name has one definition, fragments included."""
    sets = spec.layers.sets if spec.layers is not None else ()
    for group in ((*spec.parameters, *spec.lets, *sets), spec.formats):
        first: dict[str, tuple[Ident, str]] = {}
        for item in group:
            if item.name.text in first:
                here, (there, path) = item.name, first[item.name.text]
                if here.span.file != spec.file:  # a fragment's: the place to look at is this file's
                    here, there, path = there, here, item.path
                yield Problem(
                    "KV240",
                    f"`{here}` is defined twice",
                    Label(here.span),
                    secondary=(Label(there.span, f"also defined here, as `{path}`"),),
                    help="rename one of them",
                    path=item.path,
                )
            first.setdefault(item.name.text, (item.name, item.path))


def check_usable_names(spec: Spec, scope: Scope) -> Iterator[Problem]:
    """KV241: names are Python names that nothing in the generated module or the language has already."""

    def refuse(name: Ident, why: str, path: str) -> Problem:
        return Problem("KV241", f"`{name}` {why}", Label(name.span), help="choose another name", path=path)

    if spec.kind == "layout" and (why := _unfit_for_a_file(spec.name.text)):
        yield refuse(spec.name, why, "layout")
    sets = spec.layers.sets if spec.layers is not None else ()
    valued = (*spec.parameters, *spec.lets, *sets)
    made = _made_names(spec)
    for item in (*valued, *spec.formats, *spec.spaces, *spec.buffers, *spec.operations):
        name = item.name.text
        if keyword.iskeyword(name):
            yield refuse(item.name, "is a word of Python", item.path)
        elif name in WORDS_OF_THE_LANGUAGE and item in valued:
            yield refuse(item.name, "is a word of the language", item.path)
        elif name == "l" and item in valued:
            yield refuse(item.name, "is easily read as 1", item.path)
        elif name in TAKEN and item in valued:
            yield refuse(item.name, "has a meaning in the generated module", item.path)
        elif item in valued and (path := made.get(name)):
            yield refuse(item.name, f"is what the generated module calls a part of `{path}`", item.path)
    for format in spec.formats:
        for field in format.fields:
            if field.name.text in ("given", "none"):
                yield refuse(field.name, "is a word of the language", field.path)
    for operation in spec.operations:
        if operation.name.text in POOL_NAMES and operation.name.text != operation.verb:
            yield refuse(operation.name, "is a method or attribute of every pool", operation.path)


def _unfit_for_a_file(name: str) -> str | None:
    """Why no module can have the name of a layout; None where it can."""
    if keyword.iskeyword(name) or name in SOFT_WORDS:
        return "is a word of Python"
    if name in HIDDEN:
        return "would hide the module of that name"
    if name in RUN_BY_NAME:
        return "would be run by Python, pip or pytest, which look for a file of that name"
    if name in DEVICES:
        return "is a device on Windows, where no file can have that name"
    return None


def _made_names(spec: Spec) -> dict[str, str]:
    """Names that the generated module makes of others, and what they are made for."""
    made = {f"{field.name}_offset": field.path for item in spec.formats for field in item.fields}
    made |= {f"pad_{position}_offset": item.path for item in spec.formats for position in range(len(item.page))}
    made |= {f"{item.name}_page": item.path for item in spec.formats}
    made |= {f"{item.name}_page_of": item.path for item in spec.formats}
    made |= {f"page_of_{item.name}": item.path for item in spec.buffers}
    made |= {f"{item.name}_readers": item.path for item in spec.buffers if item.readers is not None}
    made |= {f"{item.name}_space": item.path for item in spec.spaces}
    return made


def check_used(spec: Spec, scope: Scope) -> Iterator[Problem]:
    """KV242: nothing is defined for nothing. What a fragment offers need not all be taken."""
    used = _used_names(spec)
    used |= {str(closest(name, scope.entities)) for name in used if name not in scope.entities}  # misspelt uses
    sets = spec.layers.sets if spec.layers is not None else ()
    own = [item for item in (*spec.parameters, *spec.lets, *sets) if item.name.span.file == spec.file]
    for item in own:
        fixed = isinstance(item, Parameter) and item.equals is not None
        if item.name.text not in used and not fixed:
            yield _unused(item.name, item.path)
    if spec.kind == "fragment":
        return
    formats = _reached_formats(spec)
    known = {format.name.text for format in spec.formats}
    for format in spec.formats:
        if format.name.text not in formats and format.name.span.file == spec.file and formats <= known:
            yield _unused(format.name, format.path)
    spaces = {buffer.space.text for buffer in spec.buffers}
    for _ in spec.spaces:
        spaces |= {
            str(case.use.parent)
            for space in spec.spaces
            if space.name.text in spaces
            for case in space.cases
            if case.use.parent is not None
        }
    known = {space.name.text for space in spec.spaces}
    for space in spec.spaces:
        if space.name.text not in spaces and spaces <= known:
            yield _unused(space.name, space.path)


def _unused(name: Ident, path: str) -> Problem:
    return Problem("KV242", f"`{name}` is never used", Label(name.span), help="remove it, or use it", path=path)


def _used_names(spec: Spec) -> set[str]:
    exprs: list[Expr | None] = [item.value for item in spec.lets]
    exprs += [item.that for item in spec.requires]
    exprs += [item.when for item in spec.notes]
    if spec.layers is not None:
        exprs += [spec.layers.body, spec.layers.draft]
        exprs += [expr for item in spec.layers.sets for case in item.cases for expr in (case.when, case.use)]
    for space in spec.spaces:
        for case in space.cases:
            use = case.use
            exprs.append(case.when)
            root = isinstance(use, Root)
            exprs += [use.slots, use.at_most, use.page, use.reserve] if root else [use.divisor, use.where]
    for buffer in spec.buffers:
        exprs += [buffer.layers, buffer.readers, buffer.block, buffer.align, buffer.split]
    found = {name for expr in exprs if expr is not None for name in names(expr)}
    for format in spec.formats:
        found |= names_of_format(spec, format.name.text)
        for plane in format.page:
            found |= _names_of_page_item(plane)
    return found


def _names_of_page_item(item: Plane | Gap) -> set[str]:
    if isinstance(item, Gap):
        return names(item.amount)
    gaps = [part for part in item.put if isinstance(part, Gap)]
    pieces = [piece for part in item.put if isinstance(part, Part) for piece in part.order or ()]
    exprs = [expr for piece in (*item.each, *pieces) for expr in (piece.low, piece.count) if expr is not None]
    return {name for expr in (*exprs, *(gap.amount for gap in gaps)) for name in names(expr)}


def _reached_formats(spec: Spec) -> set[str]:
    formats = {item.name.text: item for item in spec.formats}
    waiting = [buffer.format.text for buffer in spec.buffers] + _sized_formats(spec)
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        if name not in formats:
            continue  # reported where it is named
        waiting += [case.use.text for case in formats[name].cases]
        if formats[name].same_fields_as is not None:
            waiting.append(str(formats[name].same_fields_as))
    return found


def _sized_formats(spec: Spec) -> list[str]:
    """The formats that a `sizeof` of some let names."""
    calls = (part for item in spec.lets for part in walk(item.value) if isinstance(part, Call))
    first = [call.arguments[0] for call in calls if call.function == "sizeof"]
    return [argument.name for argument in first if isinstance(argument, Name)]


def check_references(spec: Spec, scope: Scope) -> Iterator[Problem]:
    """KV243: formats, spaces and buffers that are mentioned exist."""
    formats = {item.name.text for item in spec.formats}
    spaces = {item.name.text for item in spec.spaces}
    buffers = {item.name.text for item in spec.buffers}

    def find(name: Ident, known: set[str], what: str, path: str) -> Iterator[Problem]:
        if name.text not in known:
            listed = ", ".join(f"`{item}`" for item in sorted(known))
            there_are = f"the {what}s are {listed}" if len(known) > 1 else f"the only {what} is {listed}"
            help = suggest(name.text, known) or (there_are if known else None)
            yield Problem("KV243", f"unknown {what} `{name}`", Label(name.span), help=help, path=path)

    for format in spec.formats:
        for case in format.cases:
            yield from find(case.use, formats, "format", format.path)
        if format.same_fields_as is not None:
            yield from find(format.same_fields_as, formats, "format", f"{format.path}.fields")
            if any(item.cases and item.name == format.same_fields_as for item in spec.formats):
                message = f"`{format.same_fields_as}` stands for other formats and has no fields of its own"
                yield Problem("KV243", message, Label(format.same_fields_as.span), path=f"{format.path}.fields")
    for space in spec.spaces:
        for case in space.cases:
            if case.use.parent is not None:
                yield from find(case.use.parent, spaces, "space", space.path)
    for buffer in spec.buffers:
        yield from find(buffer.format, formats, "format", f"{buffer.path}.format")
        yield from find(buffer.space, spaces, "space", f"{buffer.path}.space")
    for operation in spec.operations:
        for name in operation.buffers or ():
            yield from find(name, buffers, "buffer", operation.path)


def check_no_circles(spec: Spec, scope: Scope) -> Iterator[Problem]:
    """KV244: formats and spaces rest on something in the end."""
    formats = {
        item.name.text: [case.use.text for case in item.cases]
        + ([item.same_fields_as.text] if item.same_fields_as is not None else [])
        for item in spec.formats
    }
    spaces = {
        item.name.text: [case.use.parent.text for case in item.cases if case.use.parent is not None]
        for item in spec.spaces
    }
    for items, edges in ((spec.formats, formats), (spec.spaces, spaces)):
        told: set[str] = set()
        for item in items:
            circle = _circle(item.name.text, edges)
            if circle and not told & set(circle):
                notes = (" -> ".join(f"`{name}`" for name in circle),)
                message = f"`{item.name}` leads back to itself"
                yield Problem("KV244", message, Label(item.name.span), notes=notes, path=item.path)
            told |= set(circle)


def _circle(start: str, edges: dict[str, list[str]]) -> tuple[str, ...]:
    """The shortest way from a name back to it, both ends included; nothing where there is none."""
    seen: set[str] = set()
    ways: list[tuple[str, ...]] = [(start,)]
    for way in ways:
        for name in edges.get(way[-1], ()):
            if name == start:
                return (*way, name)
            if name not in seen:
                seen.add(name)
                ways.append((*way, name))
    return ()


def check_parameters(spec: Spec, scope: Scope) -> Iterator[Problem]:
    """KV245: `default` and `is` lie in the domain, `min` is not above `max`, and keys fit the type."""
    roots = [case.use for space in spec.spaces for case in space.cases if isinstance(case.use, Root)]
    grows = any("requests" in names(root.slots) for root in roots)
    for item in spec.parameters:
        if item.section != "needs":
            yield from _check_parameter(item, grows)
        if item.besides is not None:
            yield from _check_besides(item, spec)


def _check_parameter(item: Parameter, grows_with_requests: bool) -> Iterator[Problem]:
    def refuse(key: str, message: str, help: str | None = None) -> Problem:
        span = item.spans.get(key, item.name.span)
        return Problem("KV245", message, Label(span), help=help, path=f"{item.path}.{key}")

    if item.minimum is not None and item.maximum is not None and item.minimum > item.maximum:
        yield refuse("min", f"`min` {item.minimum} is above `max` {item.maximum}")
    for key in ("min", "max"):
        if key in item.spans and item.kind not in ("int", "ratio"):
            yield refuse(key, f"`{key}` is for an int or a ratio, and `{item.name}` is a {item.kind}")
        elif key in item.spans and item.kind == "int" and not isinstance(_limit(item, key), int):
            yield refuse(key, f"`{key}` is no integer, and `{item.name}` is an int")
    if item.values is not None and item.kind in ("int", "ratio"):
        for key in ("min", "max"):
            if key in item.spans:
                yield refuse(key, f"`{key}` says nothing beside `of`", "leave one of the two out")
    if item.values is not None:
        named = [value for _, value in item.values]
        if len({type(value) for value in named}) > 1:
            yield refuse("of", f"the values of `{item.name}` are of different types")
        elif item.kind == "int" and any(type(value) is not int for value in named):
            yield refuse("of", f"`{item.name}` is an int, and its values are not")
        elif item.kind in ("bool", "ratio"):
            yield refuse("of", f"a {item.kind} has no `of`")
            return
    if item.letters is not None and len(set(item.letters)) < len(item.letters):
        yield refuse("of", f"a letter of `{item.name}` is there twice")
    if item.has_default and item.optional:
        yield refuse("optional", f"`{item.name}` has a default, so it is never absent", "leave one of the two out")
    if item.equals is not None and item.has_default and item.default != item.equals:
        yield refuse("default", f"the default {_written(item.default)} is not what `is` asks for")
    for key, value in (("is", item.equals), ("default", item.default), ("for_requests", item.for_requests)):
        if value is not None and (why := why_outside(item, value)):
            yield refuse(key, f"{_written(value)} {why}")
    if item.for_requests is not None and item.for_requests == item.default:
        yield refuse("for_requests", f"{_written(item.default)} is the default already", "leave out `for_requests`")
    elif item.for_requests is not None and not grows_with_requests:
        yield refuse("for_requests", "no slots grow with `requests`", "leave out `for_requests`")


def _check_besides(item: Parameter, spec: Spec) -> Iterator[Problem]:
    """KV245: what is left to another parameter is of another type, is read by one, and may be absent here."""
    span, path = item.spans["besides"], f"{item.path}.besides"
    fields = {source.name for source in item.sources if isinstance(source, Name)}
    others = (
        other
        for other in spec.parameters
        if other.kind == item.besides and any(isinstance(own, Name) and own.name in fields for own in other.sources)
    )
    if item.kind == item.besides:
        yield Problem("KV245", f"`besides` is the type of `{item.name}` itself", Label(span), path=path)
    elif not item.optional:
        message = f"`{item.name}` is absent where the config has a {item.besides}"
        yield Problem("KV245", message, Label(span), help="add `optional: true`", path=path)
    elif not any(others):
        message = f"no parameter reads the same field as a {item.besides}"
        yield Problem("KV245", message, Label(span), path=path)


def _limit(item: Parameter, key: str) -> int | Fraction | None:
    return item.minimum if key == "min" else item.maximum


def _written(value: object) -> str:
    """A value as the author writes it, in backticks."""
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def why_outside(item: Parameter, value: object) -> str | None:
    """Why a value is not in the domain of a parameter, or None."""
    if item.kind == "list":
        if not isinstance(value, tuple):
            return "is not a list"
        element = replace(item, kind="int" if item.values is None else "text")
        reasons = ((part, why_outside(element, part)) for part in value)
        return next(
            (f"has the element {_written(part)}, which {why}" for part, why in reasons if why is not None), None
        )
    if item.values is not None:
        named = [known for _, known in item.values]
        if not any(type(known) is type(value) and known == value for known in named):
            return f"is not among the values of `{item.name}`: {', '.join(map(str, named))}"
        return None
    wanted: dict[str, tuple[type, ...]] = {"int": (int,), "ratio": (int, Fraction), "bool": (bool,), "text": (str,)}
    if not isinstance(value, wanted[item.kind]) or (isinstance(value, bool) and item.kind != "bool"):
        return f"is not {'an' if item.kind == 'int' else 'a'} {item.kind}"
    if isinstance(value, (int, Fraction)) and not isinstance(value, bool):
        low = 0 if item.minimum is None else item.minimum
        if value < low:
            return f"is below {low}" if item.minimum is not None else "is below 0, and no `min` is stated"
        high = PARAMETER_MAX if item.maximum is None and item.kind == "int" else item.maximum
        if high is not None and value > high:
            return f"is above {high}" if item.maximum is not None else f"is above {high}, and no `max` is stated"
    if item.letters is not None and isinstance(value, str) and not set(value) <= set(item.letters):
        return f"has letters other than {item.letters}"
    return None


def check_sources(spec: Spec, scope: Scope) -> Iterator[Problem]:
    """KV251: a config parameter is read from a path, or from arithmetic over paths of integers."""
    for item in spec.parameters:
        for source in item.sources:
            if isinstance(source, Name):
                continue
            for part in _no_part_of_a_source(source):
                help = "a source is a dotted path, or integers and paths with + - * / min max lcm gcd"
                message = f"`{show(part)}` cannot be part of a source"
                yield Problem("KV251", message, Label(part.span), help=help, path=item.path)
            if not names(source):
                message = f"`{show(source)}` reads nothing from the config"
                help = "name a field of the config; a constant belongs under `let`"
                yield Problem("KV251", message, Label(source.span), help=help, path=item.path)
            if item.kind != "int":
                message = f"`{item.name}` is a {item.kind}; only an int is computed from fields"
                help = "`-` is minus here" if any(_is_difference(part) for part in walk(source)) else None
                yield Problem("KV251", message, Label(source.span), help=help, path=item.path)


def check_ignores(spec: Spec, scope: Scope) -> Iterator[Problem]:
    """KV252: a field that does not matter is not read."""
    first: dict[str, tuple[Parameter, Name]] = {}
    for parameter in spec.parameters:
        for part in (part for source in parameter.sources for part in walk(source)):
            if isinstance(part, Name):
                first.setdefault(part.name.partition(".")[0], (parameter, part))
    for item in spec.ignores:
        if item.name.text in first:
            parameter, part = first[item.name.text]
            yield Problem(
                "KV252",
                f"`{item.name}` is ignored, and `{parameter.name}` reads it",
                Label(item.name.span),
                secondary=(Label(part.span, "read here"),),
                help="leave one of the two out",
                path=item.path,
            )


def _is_difference(expr: Expr) -> bool:
    return isinstance(expr, Binary) and expr.operator == "-"


def _no_part_of_a_source(expr: Expr) -> Iterator[Expr]:
    """The outermost parts that the reader of a config cannot compute."""
    match expr:
        case Name():
            return
        case Literal() if type(expr.value) is int:
            return
        case Call(function="min" | "max", arguments=(_,)):
            yield expr
        case (
            Binary(operator="+" | "-" | "*" | "/") | Unary(operator="-") | Call(function="min" | "max" | "lcm" | "gcd")
        ):
            for part in children(expr):
                yield from _no_part_of_a_source(part)
        case _:
            yield expr


def check_license(spec: Spec, scope: Scope) -> Iterator[Problem]:
    """KV253: identifiers joined by AND, OR and WITH, in brackets that close."""
    if spec.license is None:
        return
    text = re.sub(r"[^() ]+", lambda word: word[0] if word[0] in ("AND", "OR", "WITH") else "id", spec.license.text)
    before = ""
    while text != before:
        before, text = text, re.sub(r"\bid (AND|OR|WITH) id\b|\(id\)", "id", text)
    if text != "id":
        message = f"`{spec.license}` is not an SPDX license expression"
        help = "write identifiers joined by AND, OR and WITH, as in `Apache-2.0 OR MIT`"
        yield Problem("KV253", message, Label(spec.license.span), help=help, path="license")


def check_needs(spec: Spec, scope: Scope) -> Iterator[Problem]:
    """KV246: the layout defines what its fragments need, within the domain they state."""
    for include in spec.includes:
        for need in include.needs:
            yield from _check_need(scope, include, need)


def _check_need(scope: Scope, include: Include, need: Parameter) -> Iterator[Problem]:
    def refuse(message: str, help: str | None = None) -> Problem:
        label = Label(need.name.span, "needed here")
        return Problem("KV246", message, Label(include.span), secondary=(label,), help=help, path="include")

    name = need.name.text
    entity = scope.entities.get(name)
    if entity is None or entity.definition is None:
        yield refuse(f"`{include.file}` needs `{name}`, which is not defined", suggest(name, scope.entities))
        return
    if entity.type is None:
        return  # a problem of its own
    wanted = {"int": Int, "ratio": (Ratio, Int), "bool": Bool}.get(need.kind)
    if wanted is not None and not isinstance(entity.type, wanted):
        yield refuse(f"`{include.file}` needs `{name}` to be {_article(need.kind)}, and it is {entity.type}")
    words = getattr(entity.type, "words", None)
    if need.values is not None:
        allowed = [value for _, value in need.values]
        outside = [word for word in words or () if word not in allowed]
        if words is None:
            listed = ", ".join(_written(value) for value in allowed)
            yield refuse(f"`{include.file}` needs `{name}` to be one of {listed}, and it is {entity.type}")
        elif outside:
            listed = " or ".join(_written(word) for word in outside)
            yield refuse(f"`{name}` can be {listed}, which `{include.file}` does not know")


def _article(kind: str) -> str:
    return f"an {kind}" if kind == "int" else f"a {kind}"


def check_requires(spec: Spec, scope: Scope) -> Iterator[Problem]:
    """Types of `require` and of the layer counts."""
    problems: list[Problem] = []
    for item in spec.requires:
        place = Place(f"{item.path}.that")
        if scope.varies(item.that):
            place = Place(place.path, frozenset({"layer"}), scope.layered_facts)
        _typed(scope, item.that, Bool, place, problems)
    if spec.layers is not None:
        for expr, path in ((spec.layers.body, "layers.body"), (spec.layers.draft, "layers.draft")):
            if expr is None:
                continue
            kind = _typed(scope, expr, Int, Place(path), problems)
            if isinstance(kind, Int) and kind.low < 0:
                help = "state a `min` for what it is made of"
                yield Problem("KV212", "the number of layers may be below 0", Label(expr.span), help=help, path=path)
    yield from problems


def check_notes(spec: Spec, scope: Scope) -> Iterator[Problem]:
    """Types of `notes`. Every `require` holds where one is said."""
    problems: list[Problem] = []
    for item in spec.notes:
        words = frozenset({"layer"}) if scope.varies(item.when) else frozenset()
        _typed(scope, item.when, Bool, Place(f"{item.path}.when", words, scope.layered_facts), problems)
    yield from problems


def _typed(scope: Scope, expr: Expr, wanted: type, place: Place, problems: list[Problem]) -> Type | None:
    """The type of an expression. Adds a problem where it is not the wanted one, or what is known has no value."""
    kind = scope.expect(expr, wanted, place, problems)
    problems += _foldable(scope, expr, place.path)
    return kind


def _foldable(scope: Scope, expr: Expr, path: str) -> Iterator[Problem]:
    """KV217: what is known at build has a value."""
    try:
        scope.fold(expr)
    except FoldError as error:
        if not error.reported:
            yield Problem("KV217", error.message, Label(error.span), path=path)


def check_cases(spec: Spec, scope: Scope) -> Iterator[Problem]:
    """KV247: some case always holds, and none is dead."""
    sets = spec.layers.sets if spec.layers is not None else ()
    for item in (*sets, *spec.spaces, *spec.formats):
        if not item.cases or (len(item.cases) == 1 and item.cases[0].when is None):
            continue
        told: set[int] = set()  # cases whose fault is known
        for position, case in enumerate(item.cases):
            if case.when is None and position < len(item.cases) - 1:
                message = f"the cases of `{item.name}` after the one without `when` are never reached"
                help = "the case without `when` comes last"
                yield Problem("KV247", message, Label(case.span), help=help, path=item.path)
                told |= set(range(position, len(item.cases)))
                break
            if case.when is not None and case.when in [other.when for other in item.cases[:position]]:
                yield Problem("KV247", f"a case of `{item.name}` is there twice", Label(case.when.span), path=item.path)
                told.add(position)
        trial = try_cases(scope, item.cases, all_apply=item in sets)
        # what a fragment leaves out, its layout must rule out
        if trial.uncovered is not None and spec.kind == "layout":
            values = " and ".join(f"`{name}` is {_written(value)}" for name, value in trial.uncovered.items())
            message = f"no case of `{item.name}` holds" + (f" where {values}" if values else "")
            help = "add a case, a last one without `when`, or a `require` that rules it out"
            yield Problem("KV247", message, Label(item.name.span), help=help, path=item.path)
        if item.name.span.file == spec.file:
            for position in trial.dead:
                case = item.cases[position]
                if position in told:
                    continue
                if case.when is not None:
                    message, span = f"this case of `{item.name}` never holds", case.when.span
                else:
                    message, span = f"the cases of `{item.name}` before this one always hold", case.span
                yield Problem("KV247", message, Label(span), path=f"{item.path}[{position}]")


def check_number_of_cases(spec: Spec, scope: Scope) -> Iterator[Problem]:
    """KV247: cases of cases do not multiply beyond what anybody can look through."""
    formats = {item.name.text: item for item in spec.formats}
    spaces = {item.name.text: item for item in spec.spaces}
    below = {name: [case.use.text for case in item.cases] for name, item in formats.items()}
    above = {
        name: [str(case.use.parent) for case in item.cases if isinstance(case.use, Derived)]
        for name, item in spaces.items()
    }
    for items, edges in ((formats, below), (spaces, above)):
        counts: dict[str, int] = {}
        for name, item in items.items():
            if _count_cases(name, edges, counts) > CASES_MAX:
                message = f"`{name}` stands for more than {CASES_MAX} cases, those of its parts multiplied"
                yield Problem("KV247", message, Label(item.name.span), path=item.path)
                break


def _count_cases(name: str, edges: dict[str, list[str]], counts: dict[str, int]) -> int:
    """Cases that a name comes to when those of its parts are written out, up to one more than there may be."""
    if name not in counts:
        counts[name] = 1  # for a circle, which is a problem of its own
        parts = edges.get(name, [])
        counts[name] = min(CASES_MAX + 1, max(1, sum(_count_cases(part, edges, counts) for part in parts)))
    return counts[name]


def check_case_types(spec: Spec, scope: Scope) -> Iterator[Problem]:
    """Types of the `when` of spaces and formats. Those of sets are typed with the names."""
    problems: list[Problem] = []
    for item in (*spec.spaces, *spec.formats):
        facts = scope.layered_facts if isinstance(item, Space) else NOTHING  # `sizeof` asks before any `require`
        type_cases(scope, item.cases, item.path, problems, lambda use, place: None, Place(item.path, facts=facts))
        for case in item.cases:
            if case.when is not None:
                yield from _foldable(scope, case.when, item.path)
    yield from problems


def check_spaces(spec: Spec, scope: Scope) -> Iterator[Problem]:
    """KV248: slots are affine in tokens and requests, pages have slots, and divisors divide them."""
    problems: list[Problem] = []

    def check(use: object, place: Place) -> None:
        if isinstance(use, Root):
            problems.extend(_check_root(scope, use, place))
        elif isinstance(use, Derived):
            problems.extend(_check_derived(spec, scope, use, place))

    for space in spec.spaces:
        type_cases(scope, space.cases, space.path, [], check, Place(space.path, facts=scope.layered_facts))
    yield from problems


def _check_root(scope: Scope, root: Root, place: Place) -> Iterator[Problem]:
    problems: list[Problem] = []

    def refuse(message: str, help: str | None, expr: Expr, key: str) -> Problem:
        return Problem("KV248", message, Label(expr.span), help=help, path=f"{place.path}.{key}")

    rates: dict[str, set[str] | None] = {}  # what each count of slots grows with; None after a problem
    for expr, key in ((root.slots, "slots"), (root.at_most, "at_most")):
        if expr is None:
            continue
        rates[key] = None
        at = Place(f"{place.path}.{key}", frozenset({"tokens", "requests"}), place.facts)
        kind = scope.expect(expr, Ratio, at, problems)
        if kind is None:
            continue
        yield from _foldable(scope, expr, at.path)
        try:
            found = affine(scope, expr)
        except FoldError:
            continue  # reported above
        if found is None:
            help = "write a sum of `tokens` and `requests` times numbers"
            yield refuse(f"`{key}` is not affine in `tokens` and `requests`", help, expr, key)
        elif (kind.low if isinstance(kind, Int) else kind.sign) < 0:
            help = "only add; state a `min` for what it is made of"
            yield refuse(f"`{key}` may be below 0", help, expr, key)
        else:
            rates[key] = {name for name, rate in found.items() if rate.known != 0}
    if root.at_most is not None and None not in rates.values():
        yield from _check_at_most(root, rates["slots"], rates["at_most"], refuse)
    for expr, key, least in ((root.page, "page", 1), (root.reserve, "reserve", 0)):
        kind = _typed(scope, expr, Int, Place(f"{place.path}.{key}", facts=place.facts), problems)
        if isinstance(kind, Int) and kind.low < least:
            yield refuse(*_too_low(f"`{key}`", kind, least), expr, key)
    yield from problems


def _check_at_most(
    root: Root, slots: set[str], at_most: set[str], refuse: Callable[[str, str | None, Expr, str], Problem]
) -> Iterator[Problem]:
    """KV248: what requests need is limited by what their tokens do.

    Args:
        slots: what `slots` grows with.
        at_most: what `at_most` grows with.
    """
    if "tokens" in slots or "requests" not in slots:
        why = "grows with `tokens`" if "tokens" in slots else "does not grow with `requests`"
        message = f"`at_most` is for slots that grow with requests alone, and `slots` {why}"
        yield refuse(message, "leave out `at_most`", root.slots, "slots")
    elif "tokens" not in at_most:
        help = "write the slots that are enough for all tokens, such as `tokens`"
        yield refuse("`at_most` does not grow with `tokens`", help, root.at_most, "at_most")


def _too_low(what: str, kind: Int, least: int) -> tuple[str, str | None]:
    """The message and help for a number that is, or may be, below `least`."""
    if kind.low == kind.high:
        return f"{what} is {kind.low}, and the least is {least}", None
    return f"{what} may be below {least}", f"state `min: {least}` for what it is made of"


def _check_derived(spec: Spec, scope: Scope, derived: Derived, place: Place) -> Iterator[Problem]:
    problems: list[Problem] = []
    pages = sorted(size for size in page_sizes(spec, scope, derived.parent.text) or () if size is not None)
    if pages and pages[-1] > DERIVED_SLOTS_MAX and (derived.divisor is not None or derived.where is not None):
        most = f"the most for a space of other slots is {DERIVED_SLOTS_MAX:,}"
        message = f"a page of `{derived.parent}` has {pages[-1]:,} slots; {most}"
        yield Problem("KV248", message, Label(derived.parent.span), path=f"{place.path}.of")
    if derived.divisor is not None:
        kind = _typed(scope, derived.divisor, Int, Place(f"{place.path}.slot", facts=place.facts), problems)
        if isinstance(kind, Int) and kind.low < 1:
            message, help = _too_low("the divisor of a slot", kind, 1)
            yield Problem("KV248", message, Label(derived.divisor.span), help=help, path=f"{place.path}.slot")
        elif kind is not None:
            folded = scope.fold(derived.divisor)
            for page in pages:
                if isinstance(folded, Literal) and page % int(folded.value):
                    message = f"a page of `{derived.parent}` has {page} slots, which {folded.value} does not divide"
                    yield Problem("KV248", message, Label(derived.divisor.span), path=f"{place.path}.slot")
    if derived.where is not None:
        at = Place(f"{place.path}.where", frozenset({"offset"}), place.facts)
        _typed(scope, derived.where, Bool, at, problems)
    yield from problems


def check_buffers(spec: Spec, scope: Scope) -> Iterator[Problem]:
    """KV249: layers are predicates, `block` divides the page, `align` and `split` are what they must be."""
    problems: list[Problem] = []
    for buffer in spec.buffers:
        for expr, key in ((buffer.layers, "layers"), (buffer.readers, "readers")):
            if expr is not None:
                at = Place(f"{buffer.path}.{key}", frozenset({"layer"}), scope.layered_facts)
                _typed(scope, expr, Bool, at, problems)
        for expr, key in ((buffer.block, "block"), (buffer.align, "align")):
            if expr is None:
                continue
            kind = _typed(scope, expr, Int, Place(f"{buffer.path}.{key}", facts=scope.layered_facts), problems)
            if isinstance(kind, Int) and kind.low < 1:
                message, help = _too_low(f"`{key}`", kind, 1)
                yield Problem("KV249", message, Label(expr.span), help=help, path=f"{buffer.path}.{key}")
        if buffer.split is not None:
            place = Place(f"{buffer.path}.split", facts=scope.layered_facts)
            _typed(scope, buffer.split, Bool, place, problems)
        yield from _check_readers(scope, buffer)
        yield from _check_split(scope, buffer)
        yield from _check_block(spec, scope, buffer)
    yield from problems


def _check_readers(scope: Scope, buffer: Buffer) -> Iterator[Problem]:
    """Some layer may read another's buffer, and some layer may be what it reads."""
    if buffer.readers is None:
        return
    try:
        owns, reads = scope.certain(buffer.layers), scope.certain(buffer.readers)
    except FoldError:
        return  # reported with its type
    label, path = Label(buffer.readers.span), f"{buffer.path}.readers"
    owners = (Label(buffer.layers.span, "the owners"),)
    if reads is False:
        message = f"no layer is a reader of `{buffer.name}`"
        yield Problem("KV249", message, label, help="leave `readers` out", path=path)
    elif owns is False:
        message = f"no layer owns `{buffer.name}`, so none can read it"
        help = "leave `readers` out, or let some layer own it"
        yield Problem("KV249", message, label, secondary=owners, help=help, path=path)
    elif owns or scope.implies(buffer.readers, buffer.layers):
        message = f"every reader of `{buffer.name}` owns it"
        help = "leave `readers` out, or name layers that read the nearest owner before them"
        yield Problem(
            "KV249", message, label, secondary=owners, notes=("an owner reads its own",), help=help, path=path
        )


def _check_split(scope: Scope, buffer: Buffer) -> Iterator[Problem]:
    """Planes that are tensors of their own have no page to align."""
    if buffer.split is None or buffer.align is None:
        return
    try:
        split, align = scope.fold(buffer.split), scope.fold(buffer.align)
    except FoldError:
        return
    if isinstance(split, Literal) and split.value is True and isinstance(align, Literal) and align.value != 1:
        help = "leave one of the two out; `align: 1 if split_it else n` keeps both for a choice"
        message = "`align` is for whole pages, and `split` makes tensors of their planes"
        yield Problem("KV249", message, Label(buffer.align.span), help=help, path=f"{buffer.path}.align")


def _check_block(spec: Spec, scope: Scope, buffer: Buffer) -> Iterator[Problem]:
    if buffer.block is None:
        return
    try:
        block = scope.fold(buffer.block)
    except FoldError:
        return
    for page in sorted(size for size in page_sizes(spec, scope, buffer.space.text) or () if size is not None):
        if isinstance(block, Literal) and type(block.value) is int and block.value > 0 and page % block.value:
            message = f"a page of `{buffer.space}` has {page} slots, which blocks of {block.value} do not fill"
            yield Problem("KV249", message, Label(buffer.block.span), path=f"{buffer.path}.block")


def check_pages(spec: Spec, scope: Scope) -> Iterator[Problem]:
    """The rules of placing.py, for every format and the slots that its buffers give it."""
    problems: list[Problem] = []
    if spec.kind == "fragment":
        for format in spec.formats:
            if fields_of(scope, format):
                resolve_page(scope, format, ALL_SLOTS, problems)
        yield from problems
        return
    formats = {item.name.text: item for item in spec.formats}
    for buffer in spec.buffers:
        try:
            slots = page_slots(spec, scope, buffer)
        except FoldError:
            continue  # reported with the buffer
        for name in sorted(_targets(formats, buffer.format.text)):
            if slots is not None and slots.known != 0 and fields_of(scope, formats[name]):
                page = resolve_page(scope, formats[name], slots, problems)
                problems += [] if page is None else _check_align(scope, buffer, page)
    for sized in _sized_formats(spec):
        for name in sorted(_targets(formats, sized)):
            if fields_of(scope, formats[name]):
                resolve_page(scope, formats[name], ALL_SLOTS, problems)
    yield from problems


def _check_align(scope: Scope, buffer: Buffer, page: Page) -> Iterator[Problem]:
    """KV249: pages that are moved apart still keep every element aligned to its size."""
    try:
        align = None if buffer.align is None else scope.fold(buffer.align)
    except FoldError:
        return
    known = page.page_bytes.known
    if known is None or not isinstance(align, Literal) or type(align.value) is not int or align.value < 2:
        return
    stride = -(-known // align.value) * align.value
    for field in page.fields:
        size = DTYPES.get(field.dtype, BYTE) // BYTE
        if size > 1 and stride % size:
            message = f"pages of `{page.format}` {stride} bytes apart do not keep `{field.name}` aligned"
            notes = (f"{field.dtype} has {size} bytes",)
            help = f"align to a multiple of {size}"
            path = f"{buffer.path}.align"
            yield Problem("KV249", message, Label(align.span), notes=notes, help=help, path=path)
            return


def _targets(formats: dict[str, Format], name: str) -> set[str]:
    """The formats with fields that a name stands for."""
    found: set[str] = set()
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        name = waiting.pop()
        if name not in formats or name in seen:
            continue
        seen.add(name)
        if not formats[name].cases:
            found.add(name)
        waiting += [case.use.text for case in formats[name].cases]
    return found


def check_operations(spec: Spec, scope: Scope) -> Iterator[Problem]:
    """KV250: an operation names fields its buffers have, all that it needs, each once."""
    formats = {item.name.text: item for item in spec.formats}
    buffers = {item.name.text: item for item in spec.buffers}
    for operation in spec.operations:
        targets = [buffers[name.text] for name in operation.buffers or () if name.text in buffers]
        problems = list(_check_operation(scope, operation, formats, targets))
        yield from problems
        if not problems:
            yield from _check_reach(spec, scope, operation, targets)
    yield from _check_owners(spec, scope)


def _check_owners(spec: Spec, scope: Scope) -> Iterator[Problem]:
    """KV250: two buffers of an operation that share the first layer of every model."""
    first = first_layers(spec, scope) if spec.operations and spec.layers is not None else []
    for shared in shared_layers(spec, scope):
        if always_shared(scope, shared, first):
            name = next(name for name in reversed(shared.operation.buffers or ()) if name == shared.other.name)
            labels = [Label(item.layers.span, f"`{item.name}` has layer 0") for item in (shared.one, shared.other)]
            yield Problem(
                "KV250",
                f"`{shared.operation.name}` cannot tell `{shared.one.name}` from `{name}`: both have layer 0",
                Label(name.span),
                secondary=tuple(labels),
                notes=("the layer says which buffer is meant, and no config keeps these apart",),
                help="give them layers of their own, or each an operation of its own",
                path=shared.operation.path,
            )


def _check_operation(
    scope: Scope, operation: Operation, formats: dict[str, Format], buffers: list[Buffer]
) -> Iterator[Problem]:
    def refuse(message: str, name: Ident, help: str | None = None) -> Problem:
        return Problem("KV250", message, Label(name.span), help=help, path=operation.path)

    if operation.buffers is not None and operation.verb in WHOLE_POOL_VERBS:
        yield refuse(f"`{operation.verb}` works on every buffer", operation.name, f"write `{operation.verb}: all`")
    if operation.buffers is None and operation.verb not in WHOLE_POOL_VERBS:
        yield refuse(f"`{operation.verb}` cannot work on `all` buffers", operation.name, "list the buffers")
    for verb, used in (
        ("store put", operation.arguments),
        ("load get gather", operation.returns),
        ("view", operation.view),
    ):
        of_rows = operation.view == "rows" and verb == "load get gather"
        if used and operation.verb not in verb.split() and not of_rows:
            key = {"store put": "args", "view": "as"}.get(verb, "returns")
            yield refuse(f"`{operation.verb}` has no `{key}`", operation.name)
    seen: dict[str, Ident] = {}
    for argument, field in operation.arguments:
        if field.text in seen:
            yield refuse(f"`{field}` is given twice", field)
        seen[field.text] = field
        if keyword.iskeyword(argument.text):
            yield refuse(f"`{argument}` is a word of Python", argument, "choose another name")
        if argument.text in ARGUMENTS_TAKEN:
            yield refuse(f"`{argument}` is an argument of every operation", argument, "choose another name")
        elif argument.text in LOCALS_OF_OPERATIONS:
            yield refuse(f"`{argument}` has a meaning in the generated module", argument, "choose another name")
    mentioned = [field for _, field in operation.arguments] + list(operation.returns or ())
    for buffer in buffers:
        for name in sorted(_targets(formats, buffer.format.text)):
            fields = {item.name.text: item for item in fields_of(scope, formats[name])}
            if not fields:
                continue  # of a format that does not exist, or of itself
            yield from _check_fields(operation, buffer, name, fields, mentioned)
            if operation.view == "rows" and not _is_rows(formats[name]):
                message = f"`{operation.name}` cannot show rows: a page of `{name}` is not one record for each slot"
                yield refuse(message, operation.name, "write `as: pages`")


def _check_reach(spec: Spec, scope: Scope, operation: Operation, buffers: list[Buffer]) -> Iterator[Problem]:
    """KV250, KV205: what the pool can do for the buffers and fields of an operation."""
    formats = {item.name.text: item for item in spec.formats}
    named = tuple(field.text for field in (*(field for _, field in operation.arguments), *(operation.returns or ())))
    shapes: dict[str, tuple[str, str]] = {}
    for buffer in buffers:
        if buffer.memory == "host":
            message = f"`{buffer.name}` lies in host memory, which a pool does not allocate"
            yield Problem("KV250", message, Label(operation.name.span), path=operation.path)
            return
        if operation.verb == "view" and operation.view != "fields" and _may_split(scope, buffer):
            message = f"`{operation.name}` cannot show {operation.view or 'pages'} of `{buffer.name}`"
            notes = ("its planes may be tensors of their own",)
            help = "write `as: fields`"
            yield Problem("KV250", message, Label(operation.name.span), notes=notes, help=help, path=operation.path)
            return
        missing = _missing_of_buffer(spec, scope, operation, buffer)
        if missing is not None:
            yield _unsupported(operation, missing)
            return
        try:
            slots = page_slots(spec, scope, buffer)
        except FoldError:
            return  # reported with the buffer
        for name in sorted(_targets(formats, buffer.format.text)):
            page = None if slots is None else resolve_page(scope, formats[name], slots, [])
            if page is None:
                continue  # reported with the page
            fields = {field.name: field for field in page.fields}
            used = fields_or_default(page, operation.verb, named)
            if operation.verb in KERNEL_VERBS:
                missing = unsupported(page, operation.verb, used)
                if missing is not None:
                    yield _unsupported(operation, missing)
                    return
            if operation.verb == "view" and operation.view == "rows" and named and not side_by_side(page, used):
                listed = ", ".join(f"`{name}`" for name in used)
                message = f"`{operation.name}` cannot show rows of {listed}: they do not lie side by side in `{name}`"
                yield Problem("KV250", message, Label(operation.name.span), path=operation.path)
                return
            for field in used if operation.verb in ("store", "put", "load") else ():
                shape = f"[{', '.join(map(str, fields[field].shape[1:]))}]"
                other, wanted = shapes.setdefault(field, (name, shape))
                if shape != wanted:
                    message = f"`{operation.name}` needs `{field}` alike in `{other}` and `{name}`"
                    notes = (f"{wanted} there, {shape} here",)
                    yield Problem("KV250", message, Label(operation.name.span), notes=notes, path=operation.path)
                    return


def _unsupported(operation: Operation, what: str) -> Problem:
    help = "leave the operation out: without it the pool still allocates, moves, saves and restores"
    return Problem("KV205", f"{what} is not supported yet", Label(operation.name.span), help=help, path=operation.path)


def _may_split(scope: Scope, buffer: Buffer) -> bool:
    split = None if buffer.split is None else scope.fold(buffer.split)
    return split is not None and not (isinstance(split, Literal) and split.value is False)


def _missing_of_buffer(spec: Spec, scope: Scope, operation: Operation, buffer: Buffer) -> str | None:
    """What of an operation on a buffer is not there yet, whatever its fields are."""
    verb = operation.verb
    cases = [case for space in spec.spaces if space.name == buffer.space for case in space.cases]
    derived = [case.use for case in cases if isinstance(case.use, Derived)]
    if verb == "gather" and any(use.operator is not None or use.where is not None for use in derived):
        return "a gather from slots that stand for those of another space"
    return None


def _is_rows(format: Format) -> bool:
    """Whether the page is one plane that repeats over `slot` alone."""
    if len(format.page) != 1 or not isinstance(format.page[0], Plane):
        return False
    return [(str(piece.axis), piece.low, piece.count) for piece in format.page[0].each] == [("slot", None, None)]


def _check_fields(
    operation: Operation, buffer: Buffer, format: str, fields: dict[str, Field], mentioned: list[Ident]
) -> Iterator[Problem]:
    scales = {str(item.quant.scale) for item in fields.values() if item.quant is not None}
    values = [name for name in fields if name not in scales]
    known = set(values) if operation.verb in ("store", "load") else set(fields)
    for name in mentioned:
        if name.text not in known:
            made = name.text in fields
            message = (
                f"`{operation.verb}` makes `{name}` itself"
                if made
                else f"`{format}`, a format of `{buffer.name}`, has no field `{name}`"
            )
            yield Problem(
                "KV250",
                message,
                Label(name.span),
                help=None if made else suggest(name.text, known),
                path=operation.path,
            )
    if operation.verb in ("store", "put"):
        given = {name.text for name in mentioned}
        missing = [name for name in fields if name in known and name not in given]
        if missing:
            listed = ", ".join(f"`{name}`" for name in missing)
            message = f"`{operation.name}` leaves out {listed} of `{format}`, a format of `{buffer.name}`"
            notes = ("a slot would keep what it held there before",)
            help = f"add an argument for {listed} to `args`"
            yield Problem("KV250", message, Label(operation.name.span), notes=notes, help=help, path=operation.path)


CHECKS: tuple[Callable[[Spec, Scope], Iterator[Problem]], ...] = (
    check_defined_once,
    check_usable_names,
    check_used,
    check_references,
    check_no_circles,
    check_parameters,
    check_sources,
    check_ignores,
    check_license,
    check_needs,
    check_requires,
    check_notes,
    check_cases,
    check_number_of_cases,
    check_case_types,
    check_spaces,
    check_buffers,
    check_pages,
    check_operations,
)
