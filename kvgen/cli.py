"""The command line: kvgen check, build, explain, budget, diff, profile, specs, schema.

Results go to stdout, problems to stderr. With `--format json` stdout holds one JSON document, the result or
`{"problems": [...]}`. Exit status: 0 done and current; 1 a spec or config has problems, or `--check` found stale
output; 2 usage, input and output, or a fault of kvgen itself.
"""

from __future__ import annotations

import argparse
import difflib
import io
import itertools
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, TypeVar

from kvgen.files import STDIN, check_file, current, is_generated, replace_file, spec_reader, unmade, writing_to
from kvgen.problems import (
    NOWHERE,
    Label,
    Problem,
    Severity,
    Span,
    printable,
    quote,
    reason,
    render_concise,
    render_json,
    render_text,
    sort_problems,
)
from kvgen.side import FORM, Side, SideError, parse_side
from kvgen.targets import TARGETS
from kvgen.text import ending

if TYPE_CHECKING:
    from kvgen.compile import Compiled
    from kvgen.deployment import Deployment
    from kvgen.spec import Parameter

CODES = {
    "KV401": "a config that the layout refuses",
    "KV402": "two specs that write the same file",
    "KV403": "a fragment where a layout is needed",
    "KV404": "memory that is too small for the reserved pages, or for one request (a warning)",
    "KV405": "a layout that is no pool of the engine",
    "KV406": "a config that no shipped layout is for, or more than one",
    "KV407": "a field of a config that the layout does not know (a warning)",
    "KV408": "layers whose slots grow with requests, and no requests (a warning)",
    "KV409": "what a layout says of a config and choices (a warning)",
    "KV410": "a command line that cannot be read",
    "KV411": "a file that cannot be read or written",
    "KV412": "memory or a package that is not there",
    "KV499": "a fault of kvgen itself",
}

SET = "--set "
T = TypeVar("T")


class Failure(Exception):
    """Ends a command with problems and an exit status."""

    def __init__(self, status: int, problems: Sequence[Problem], texts: Mapping[str, str] | None = None) -> None:
        super().__init__(status)
        self.status, self.problems, self.texts = status, tuple(problems), dict(texts or {})


def usage(message: str, help: str | None = None) -> Failure:
    return Failure(2, [Problem("KV410", message, Label(NOWHERE), help=help)])


def unreadable(file: str, error: OSError, what: str = "read") -> Failure:
    return Failure(2, [Problem("KV411", f"cannot {what} `{file}`: {reason(error)}", Label(Span.of_file(file)))])


class _Output(io.TextIOBase):
    """Standard output. Failure where it cannot be written; a reader that has gone is a BrokenPipeError."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self._tried(lambda: self.stream.write(text))

    def flush(self) -> None:
        self._tried(self.stream.flush)

    def _tried(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise unreadable("standard output", error, "write") from None


def main(argv: Sequence[str], stdin: IO[bytes], stdout: IO[str], stderr: IO[str]) -> int:
    """Run one command; the exit status."""
    form, output = _format_of(argv), _Output(stdout)
    try:
        try:
            with redirect_stdout(output):  # argparse prints help where `print` does
                arguments = _parser().parse_args(list(argv))
            status = arguments.run(arguments, stdin, output, stderr)
        except SystemExit:  # --help
            status = 0
        output.flush()
        return status
    except Failure as error:
        failure = error
    except BrokenPipeError:
        raise
    except Exception as error:
        failure = Failure(2, [_outside(error) or _fault(error)])
    try:
        _report(failure.problems, failure.texts, form, output, stderr)
        output.flush()
    except Failure:  # JSON goes to standard output too
        _report(failure.problems, failure.texts, "text", output, stderr)
    return failure.status


def _outside(error: Exception) -> Problem | None:
    """What the machine or its system refuses; None where the fault is one of kvgen."""
    match error:
        case OSError():
            return _refused_by_system(error)
        case MemoryError():
            return Problem(
                "KV412", "not enough memory", Label(NOWHERE), help="see what `ulimit -v` or the container allows"
            )
        case ImportError() if (error.name or "kvgen").partition(".")[0] != "kvgen":
            name = error.name.partition(".")[0]
            why = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be imported: {error}"
            package = "kvgen[pool]" if name in ("torch", "triton") else "kvgen"
            return Problem("KV412", f"`{name}` {why}", Label(NOWHERE), help=f"pip install '{package}'")
    return None


def _refused_by_system(error: OSError) -> Problem:
    """KV411: a file, or something else of the system, that cannot be used."""
    file = "" if error.filename is None else os.fsdecode(error.filename)
    message = f"cannot use `{file}`: {reason(error)}" if file else f"the system refuses: {reason(error)}"
    return Problem("KV411", message, Label(Span.of_file(file)))


def _fault(error: Exception) -> Problem:
    """A fault of kvgen itself, with the place in its code."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{type(error).__name__} at line {at.lineno} of {Path(at.filename).name}"
    help = "this is a bug in kvgen: please report it with the spec"
    return Problem("KV499", str(error) or "no message", Label(NOWHERE), notes=(where,), help=help)


def main_entry() -> NoReturn:
    """The console script. What it prints is UTF-8 with line feeds, whatever the locale."""
    if sys.stdout is not None:
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")  # type: ignore[union-attr]
    try:
        stdin = sys.stdin.buffer if sys.stdin is not None else io.BytesIO()
        stdout, stderr = (stream or io.StringIO() for stream in (sys.stdout, sys.stderr))
        status = main(sys.argv[1:], stdin, stdout, stderr)
        stdout.flush()
    except (OSError, KeyboardInterrupt):  # nobody reads what is printed, or there is no room for it
        status = 2
    if status == 2 and sys.stdout is not None:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes what is left there
    sys.exit(status)


# -- arguments


class _Parser(argparse.ArgumentParser):
    """Raises what argparse would print."""

    def error(self, message: str) -> NoReturn:
        raise usage(message, f"see `{self.prog} --help`")


def _parser() -> _Parser:
    parser = _Parser(prog="kvgen", description="Compile KV-cache layouts.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    formats = {"choices": ("text", "concise", "json"), "default": "text", "help": "how to print"}

    check = commands.add_parser("check", help="say what is wrong with specs", allow_abbrev=False)
    check.add_argument("specs", nargs="+", metavar="SPEC", help="a spec, or - for standard input")
    check.add_argument("--format", **formats)
    check.set_defaults(run=_check)

    build = commands.add_parser("build", help="write the module of each layout", allow_abbrev=False)
    build.add_argument("specs", nargs="+", metavar="SPEC", help="a spec, or - for standard input")
    build.add_argument("-o", dest="output", default="generated", metavar="DIR", help="default: generated; - prints")
    build.add_argument("--engine", choices=("sglang",), help="write its adapter too, to DIR/ENGINE")
    build.add_argument("--check", action="store_true", help="write nothing; fail where a module is not current")
    build.add_argument("--diff", action="store_true", help="print what changes")
    build.add_argument("--force", action="store_true", help="replace files that kvgen did not write too")
    build.add_argument("--format", **formats)
    build.set_defaults(run=_build)

    explain = commands.add_parser("explain", help="print the byte map of a layout", allow_abbrev=False)
    explain.add_argument("spec", metavar="SPEC", help="a spec, or - for standard input")
    explain.add_argument("--config", metavar="FILE", help="a config.json: print owners and sizes too")
    _add_set(explain)
    explain.add_argument("--format", **formats)
    explain.set_defaults(run=_explain)

    budget = commands.add_parser("budget", help="price a model's config", allow_abbrev=False)
    help = "a spec, or - for standard input; without one, the shipped layout that the config is for"
    budget.add_argument("spec", nargs="?", metavar="SPEC", help=help)
    budget.add_argument("--config", metavar="FILE", required=True, help="a config.json")
    _add_set(budget)
    amount = budget.add_mutually_exclusive_group(required=True)
    help = "as many tokens as fit into a device's, such as 80GiB or 8589934592; may be repeated"
    amount.add_argument("--memory", dest="memories", action="append", metavar="SIZE", help=help)
    amount.add_argument("--tokens", metavar="N", help="this many tokens")
    people = budget.add_mutually_exclusive_group()
    help = "requests at a time: what they cost, and the longest context of each; default: 0"
    people.add_argument("--requests", metavar="N", help=help)
    people.add_argument("--context", metavar="N", help="as many requests as fit, with so many tokens each")
    help = "stages of a pipeline, a device for each: their number, or the layers of each, as in 20,20,21"
    budget.add_argument("--pp", metavar="N", help=help)
    help = "a draft model on the same device (the last stage's), as SPEC[,config=FILE][,K=V]...; may be repeated"
    budget.add_argument("--draft", dest="drafts", action="append", default=[], metavar="SIDE", help=help)
    budget.add_argument("--format", **formats)
    budget.set_defaults(run=_budget)

    diff = commands.add_parser("diff", help="say what sets two layouts apart, and why", allow_abbrev=False)
    help = "SPEC[,config=FILE][,K=V]..., or config=FILE[,K=V]... for the shipped layout that the config is for"
    diff.add_argument("sides", nargs=2, metavar="SIDE", help=help)
    diff.add_argument("--memory", metavar="SIZE", help="count the tokens that fit too; needs configs")
    diff.add_argument("--format", **formats)
    diff.set_defaults(run=_compare)

    profile = commands.add_parser("profile", help="say what kernels are compiled to, without a GPU", allow_abbrev=False)
    profile.add_argument("spec", metavar="SPEC", help="a spec, or - for standard input")
    help = "a config.json, for its sizes and every choice of names; without one, for those of the spec's expectations"
    profile.add_argument("--config", metavar="FILE", help=help)
    _add_set(profile)
    help = f"a target: {', '.join(TARGETS)}; may be repeated; default: all of them"
    profile.add_argument("--arch", dest="targets", action="append", choices=TARGETS, metavar="ARCH", help=help)
    profile.add_argument("--format", **formats)
    profile.set_defaults(run=_profile)

    specs = commands.add_parser(
        "specs", help="list the shipped layouts, and say which a config is for", allow_abbrev=False
    )
    specs.add_argument(
        "--config", metavar="FILE", help="a config.json: say of each layout whether it is for that model"
    )
    _add_set(specs)
    specs.add_argument("--format", **formats)
    specs.set_defaults(run=_specs)

    schema = commands.add_parser("schema", help="print the JSON Schema of a spec", allow_abbrev=False)
    schema.add_argument("--format", **formats)
    schema.set_defaults(run=_schema)
    return parser


def _add_set(parser: argparse.ArgumentParser) -> None:
    help = "a choice of the layout, role, start_layer or end_layer; may be repeated"
    parser.add_argument("--set", dest="choices", action="append", default=[], metavar="K=V", help=help)


def _format_of(argv: Sequence[str]) -> str:
    """The format asked for, also where the rest of the command line is wrong."""
    for position, word in enumerate(argv):
        if word.startswith("--format="):
            return word.partition("=")[2]
        if word == "--format" and position + 1 < len(argv):
            return argv[position + 1]
    return "text"


# -- commands


def _check(arguments: argparse.Namespace, stdin: IO[bytes], stdout: IO[str], stderr: IO[str]) -> int:
    compiled = _compile_given(arguments.specs, stdin)
    _report(*_warnings(compiled), arguments.format, stdout, stderr)
    return 0


def _warnings(compiled: Sequence[Compiled]) -> tuple[list[Problem], dict[str, str]]:
    """What is worth saying of specs that compiled, and the texts for excerpts."""
    texts = {file: text for item in compiled for file, text in item.texts.items()}
    return [problem for item in compiled for problem in item.problems], texts


def _build(arguments: argparse.Namespace, stdin: IO[bytes], stdout: IO[str], stderr: IO[str]) -> int:
    compiled = _compile_given(arguments.specs, stdin)
    warnings, excerpts = _warnings(compiled)
    if arguments.format != "json":
        _report(warnings, excerpts, arguments.format, stdout, stderr)
    modules = {item.layout.name: item for item in compiled if item.layout is not None}
    if arguments.output == "-":
        return _print_module(arguments, list(modules.values()), stdout)
    folder = Path(arguments.output)
    texts = {folder / f"{name}.py": item.module.text for name, item in sorted(modules.items())}
    if arguments.engine is not None:
        adapters = _adapters(arguments.engine, list(modules.values()))
        texts |= {folder / arguments.engine / f"{name}.py": text for name, text in adapters.items()}
    before = {path: _text_of(path) for path in texts}
    foreign = [
        path for path, old in before.items() if old is not None and not is_generated(old) and not arguments.force
    ]
    if foreign and not arguments.check:
        raise Failure(2, [_foreign(path) for path in foreign])
    states = {path: "missing" if old is None else "changed" for path, old in before.items() if old != texts[path]}
    states |= dict.fromkeys(foreign, "foreign")
    folders = sorted({folder, *(path.parent for path in texts)})
    if arguments.check:
        extra = [path for own in folders for path in _unmade(own, texts, arguments.specs)]
        states |= dict.fromkeys(extra, "extra")
        before |= {path: _text_of(path) for path in extra}
    if arguments.diff and arguments.format != "json":
        for path in sorted(states):
            stdout.write(_diff(before.get(path), texts.get(path), path))
    for own in folders if texts and not arguments.check else ():
        _write({path: text for path, text in texts.items() if path.parent == own and path in states}, own)
    _say_states(arguments, states, texts, before, warnings, stdout)
    return 1 if arguments.check and states else 0


def _adapters(engine: str, compiled: Sequence[Compiled]) -> dict[str, str]:
    """The engine's pools for layouts, by their names. Failure where one of them is none."""
    from kvgen.adapt import adapt, kind_of

    problems, excerpts, texts = [], {}, {}
    for item in compiled:
        kind, wrong = kind_of(item.layout, engine)
        if wrong:
            message = f"`{item.layout.name}` is not {kind.title}: {wrong[0]}"
            label, help = Label(item.spec.name.span), f"build it without --engine {engine}"
            problems.append(Problem("KV405", message, label, notes=wrong[1:], help=help, path="layout"))
            excerpts |= item.texts
        else:
            texts[item.layout.name] = adapt(item.layout, item.scope, kind)
    if problems:
        raise Failure(1, problems, excerpts)
    return texts


def _say_states(
    arguments: argparse.Namespace,
    states: Mapping[Path, str],
    texts: Mapping[Path, str],
    before: Mapping[Path, str | None],
    warnings: Sequence[Problem],
    stdout: IO[str],
) -> None:
    if arguments.format == "json":
        files = []
        for path in sorted({*texts, *states}):
            entry = {"file": printable(path.as_posix()), "state": states.get(path, "current")}
            if arguments.diff:
                entry["diff"] = _diff(before.get(path), texts.get(path), path)
            files.append(entry)
        _print_json({"files": files, "problems": render_json(sort_problems(warnings))}, stdout)
        return
    for path in sorted({*texts, *states}):
        state = states.get(path)
        if arguments.check and state is not None:
            stdout.write(f"{state}: {printable(path.as_posix())}\n")
        elif not arguments.check:
            stdout.write(f"{'wrote' if state is not None else 'current'}: {printable(path.as_posix())}\n")


def _print_module(arguments: argparse.Namespace, modules: list[Compiled], stdout: IO[str]) -> int:
    if arguments.check or arguments.diff or arguments.force:
        raise usage("`-o -` prints a module; --check and --diff compare files, and --force replaces them")
    if arguments.engine is not None:
        raise usage(f"`-o -` prints one module; with --engine {arguments.engine} there are two")
    if len(modules) != 1:
        raise usage(f"`-o -` prints one module, and the specs make {len(modules)}")
    if arguments.format == "json":
        _print_json({"files": [{"file": f"{modules[0].layout.name}.py", "text": modules[0].module.text}]}, stdout)
    else:
        stdout.write(modules[0].module.text)
    return 0


def _explain(arguments: argparse.Namespace, stdin: IO[bytes], stdout: IO[str], stderr: IO[str]) -> int:
    from kvgen.explain import explain, explain_json

    compiled = _compile_layout(arguments.spec, stdin)
    resolved, warnings = None, []
    if arguments.config is not None:
        resolved = _resolve(compiled, arguments.config, arguments.choices)
        warnings = _remarks(compiled, resolved, arguments.config)
    elif arguments.choices:
        raise usage("--set needs --config")
    if arguments.format == "json":
        document = explain_json(compiled.layout, compiled.namespace, resolved)
        _print_json(document | {"problems": render_json(sort_problems(warnings))}, stdout)
    else:
        _report(warnings, {}, arguments.format, stdout, stderr)
        stdout.write(explain(compiled.layout, compiled.namespace, resolved))
    return 0


def _budget(arguments: argparse.Namespace, stdin: IO[bytes], stdout: IO[str], stderr: IO[str]) -> int:
    from kvgen.budget import OtherWay, Question, budget_as_json, shown
    from kvgen.budget_text import render

    memories = {text: size_in_bytes(text) for text in arguments.memories or ()}
    tokens = None if arguments.tokens is None else _count(arguments.tokens, "--tokens")
    requests = None if arguments.requests is None else _count(arguments.requests, "--requests")
    context = None if arguments.context is None else _count(arguments.context, "--context", least=1)
    question = Question(tokens, requests, context)
    models, warnings = _models(arguments, stdin)
    deployment, way = _ways(models, arguments.pp, question.counts_requests)
    if tokens is not None:
        try:
            deployment.check(tokens)
        except ValueError as error:
            raise usage(str(error)) from None
    budgets = tuple(question.answer(deployment, memory) for memory in memories.values() or (None,))
    other = None if way is None else OtherWay.of(question, budgets[0], way)
    placed = [(pool, model) for stage in deployment.stages for pool, model in zip(stage.pools, models, strict=False)]
    warnings += dict.fromkeys(note for pool, model in placed for note in _notes(pool.layout, str(model.side.config)))
    for text, budget in zip(memories, budgets, strict=False):
        if not budget.fits:
            message = f"`{printable(text)}` is smaller than the fixed cost of {shown(budget.total_bytes)} bytes"
            help = _unit_left_out(text, memories[text])
            warnings.append(Problem("KV404", message, Label(NOWHERE), help=help, severity=Severity.WARNING))
        elif context is not None and not budget.requests:
            one = max(stage.bytes_for(deployment.tokens_for(1, context), 1) for stage in deployment.stages)
            message = f"`{printable(text)}` is too small for one request of {context:,} tokens"
            notes = (f"one request takes {shown(one)} bytes, reserved pages included",)
            warnings.append(Problem("KV404", message, Label(NOWHERE), notes=notes, severity=Severity.WARNING))
    if not question.counts_requests:
        layers = [layer for pool in deployment.pools for layer in pool.request_layers]
        told = _no_requests(layers, "and `--requests` is 0", "add `--requests N` or `--context N`")
        warnings += [told] if told is not None else []
    if arguments.format == "json":
        _print_json(budget_as_json(budgets, other) | {"problems": render_json(sort_problems(warnings))}, stdout)
    else:
        _report(warnings, {}, arguments.format, stdout, stderr)
        stdout.write(render(budgets, other))
    return 0


def _no_requests(layers: Collection[int], how: str, help: str | None = None) -> Problem | None:
    """KV408 of layers, by their ids in each pool, whose slots grow with requests where there are none."""
    if not layers:
        return None
    message = f"the slots of {len(layers)} layer{ending(len(layers))} grow with requests, {how}"
    notes = ("their cost is not included",)
    return Problem("KV408", message, Label(NOWHERE), notes=notes, help=help, severity=Severity.WARNING)


def _unit_left_out(text: str, size: int) -> str | None:
    """What to say of a size that is a bare number, and too small for any cache."""
    if not text.strip().isdigit() or size >= UNITS["MiB"]:
        return None
    return f"a size without a unit is in bytes: did you mean `{text.strip()}GiB`?"


@dataclass(frozen=True)
class Model:
    """The target or a draft of a command line, and its layout."""

    side: Side
    compiled: Compiled
    layout: Any
    flag: str

    def counting_requests(self) -> Model:
        """The same with what its choices are where requests are counted, but for those that are set."""
        own = {setting.partition("=")[0] for setting in self.side.settings}
        found = {name: item.for_requests for name, item in _choices_of(self.compiled).items() if name not in own}
        more = [f"{name}={_as_text(value)}" for name, value in found.items() if value is not None]
        if not more:
            return self
        side = replace(self.side, settings=(*self.side.settings, *more))
        return replace(self, side=side, layout=_resolve(self.compiled, side.config, side.settings, self.flag))


def _models(arguments: argparse.Namespace, stdin: IO[bytes]) -> tuple[list[Model], list[Problem]]:
    """The target and the drafts, and the fields of their configs that they do not know."""
    target = Side(arguments.spec, arguments.config, tuple(arguments.choices))
    models = [Model(target, *_layout_of(target, stdin), SET)]
    for side in (_draft(text, arguments.config) for text in arguments.drafts):
        models.append(Model(side, *_layout_of(side, stdin, "--draft "), "--draft "))
    warnings = [problem for model in models for problem in _unknown_fields(model.compiled, model.side.config)]
    return models, list(dict.fromkeys(warnings))


def _ways(models: Sequence[Model], pp: str | None, counted: bool) -> tuple[Deployment, Deployment | None]:
    """The models on their devices, for requests that are counted or for none; and the other way, where it differs."""
    default = _deployment(models, pp)
    try:
        by_requests = [model.counting_requests() for model in models]
    except Failure:
        if counted:
            raise
        return default, None
    other = _deployment(by_requests, pp) if by_requests != models else default
    ours, theirs = ([pool.request_layers for pool in way.pools] for way in (default, other))
    if ours == theirs:
        return default, None
    return (other, default) if counted else (default, other)


def _deployment(models: Sequence[Model], pp: str | None) -> Deployment:
    """The stages of `--pp`, with the pools of drafts on the last one."""
    from kvgen.deployment import Deployment, Pool, Stage

    target, *drafts = models
    layouts = [target.layout] if pp is None else _stages(pp, target.compiled, target.side)
    stages = [(Pool(target.compiled, layout),) for layout in layouts]
    last = (*stages[-1], *(Pool(draft.compiled, draft.layout) for draft in drafts))
    return Deployment(tuple(map(Stage, (*stages[:-1], last))))


def _layout_of(side: Side, stdin: IO[bytes], flag: str = SET) -> tuple[Compiled, Any]:
    """A compiled spec, and its layout of a config and choices."""
    if side.spec is None:
        return _pick(str(side.config), side.settings, flag)
    compiled = _compile_layout(side.spec, stdin)
    return compiled, _resolve(compiled, str(side.config), side.settings, flag)


def _draft(text: str, config: str) -> Side:
    """A draft model; without a config of its own, it has the target's."""
    try:
        side = parse_side(text)
    except SideError as error:
        raise usage(f"--draft: {error}", FORM) from None
    return side if side.config is not None else replace(side, config=config)


def _stages(text: str, compiled: Compiled, target: Side) -> list[Any]:
    """The layout of each stage of a pipeline. The draft layers of the model are on the last one."""
    from kvgen.deployment import even_split

    for setting in target.settings:
        if setting.partition("=")[0] in ("start_layer", "end_layer"):
            raise usage(f"--pp {text}: it sets start_layer and end_layer: leave out `--set {setting}`")
    numbers = [_count(part, f"--pp {text}") for part in text.split(",")]
    roles = [setting for setting in target.settings if setting.partition("=")[0] != "role"]
    body = len(_resolve(compiled, target.config, [*roles, "role=target"]).held)
    layers = f"the model has {body} layer{'' if body == 1 else 's'}"
    if len(numbers) > 1:
        if sum(numbers) != body:
            raise usage(f"--pp {text}: the stages have {sum(numbers)} layers, and {layers}")
    elif not 1 <= numbers[0] <= body:
        raise usage(f"--pp {text}: expected 1 to {body} stages: {layers}" if body else f"--pp {text}: {layers}")
    counts = numbers if len(numbers) > 1 else even_split(body, numbers[0])
    bounds = [sum(counts[:stage]) for stage in range(len(counts))]
    stages = [*zip(bounds, bounds[1:], strict=False), (bounds[-1], None)]
    found = []
    for start, end in stages:
        cut = [f"start_layer={start}", *([] if end is None else [f"end_layer={end}"])]
        found.append(_resolve(compiled, target.config, [*target.settings, *cut]))
    return found


def _compare(arguments: argparse.Namespace, stdin: IO[bytes], stdout: IO[str], stderr: IO[str]) -> int:
    from kvgen.deployment import Pool
    from kvgen.difference import Priced, compare, render

    a, b = (_side(text) for text in arguments.sides)
    if (a.config is None) != (b.config is None):
        without = arguments.sides[0 if a.config is None else 1]
        raise usage(f"{without}: has no config, and the other side has one", "give both sides a config, or neither")
    if a.config is None and (a.settings or b.settings):
        raise usage("choices need a config", "add config=FILE to both sides")
    if a.config is None and arguments.memory is not None:
        raise usage("--memory needs a config", "add config=FILE to both sides")
    memory = None if arguments.memory is None else size_in_bytes(arguments.memory)
    named = {spec: _compile_layout(spec, stdin) for spec in dict.fromkeys((a.spec, b.spec)) if spec is not None}
    left, right = (_of_side(side, named, stdin) for side in (a, b))
    priced = None
    if a.config is not None:
        priced = tuple(Priced(compiled.namespace, compiled.layout, layout) for compiled, layout in (left, right))
    difference = compare((left[0].layout, right[0].layout), priced, memory)
    sides = ((*left, a.config), (*right, b.config))
    warnings = [problem for *own, file in sides if file is not None for problem in _remarks(*own, file)]
    if memory is not None:
        warnings += (_no_requests(Pool(*own).request_layers, "and none are counted") for own in (left, right))
    warnings = list(dict.fromkeys(problem for problem in warnings if problem is not None))
    if arguments.format == "json":
        _print_json(difference.as_json() | {"problems": render_json(sort_problems(warnings))}, stdout)
    else:
        _report(warnings, {}, arguments.format, stdout, stderr)
        stdout.write(render(difference, memory))
    return 0 if difference.same else 1


def _side(text: str) -> Side:
    try:
        return parse_side(text)
    except SideError as error:
        raise usage(str(error), FORM) from None


def _of_side(side: Side, named: Mapping[str, Compiled], stdin: IO[bytes]) -> tuple[Compiled, Any]:
    """The spec of a side, compiled, and its layout where it has a config."""
    if side.spec is None:
        return _pick(str(side.config), side.settings, flag="")
    compiled = named[side.spec]
    resolved = None if side.config is None else _resolve(compiled, side.config, side.settings, flag="")
    return compiled, resolved


def _profile(arguments: argparse.Namespace, stdin: IO[bytes], stdout: IO[str], stderr: IO[str]) -> int:
    from concurrent.futures.process import BrokenProcessPool

    from kvgen.expect import examples
    from kvgen.profile import profiles, render

    compiled = _compile_layout(arguments.spec, stdin)
    inputs = []
    if arguments.config is not None:
        _resolve(compiled, arguments.config, arguments.choices)
        given = _choices(compiled, _settings(arguments.choices, SET), SET)
        first = (_read_config(arguments.config, compiled), given)
    elif arguments.choices:
        raise usage("--set needs --config")
    else:
        inputs = examples(compiled.spec, compiled.namespace, spec_reader(compiled.file, stdin))
        if not inputs:
            raise usage(f"{arguments.spec}: has no expectation to take sizes from", "add --config FILE")
        first, given = inputs[0], {}
    inputs += [(first[0], {**first[1], **own}) for own in _combinations(compiled, given)]
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise usage("kvgen profile compiles kernels", "unset TRITON_INTERPRET, by which Triton interprets them")
    try:
        found = profiles(compiled.module.text, compiled.layout, inputs, arguments.targets or list(TARGETS))
    except OSError as error:
        help = "Triton keeps kernels in `TRITON_CACHE_DIR`, or else in `.triton/cache` of the home folder"
        raise Failure(2, [replace(_refused_by_system(error), help=help)]) from None
    except BrokenProcessPool:
        message = "a process that compiled kernels was ended from outside"
        help = "where it took too much memory, try one target with `--arch`"
        raise Failure(2, [Problem("KV412", message, Label(NOWHERE), help=help)]) from None
    if arguments.format == "json":
        _print_json({target: [own.as_json() for own in kernels] for target, kernels in found.items()}, stdout)
    else:
        stdout.write("\n".join(render(kernels, target) for target, kernels in found.items()))
    return 0


def _combinations(compiled: Compiled, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every choice of names, such as formats, that is not given, with each of the others."""
    named = {name: own.values for name, own in _choices_of(compiled).items() if own.values and name not in given}
    for values in itertools.product(*named.values()):
        yield {name: value for name, (_, value) in zip(named, values, strict=True)}


def _specs(arguments: argparse.Namespace, stdin: IO[bytes], stdout: IO[str], stderr: IO[str]) -> int:
    from kvgen.shipped import summary

    if arguments.config is not None:
        verdicts = _judge(arguments.config, arguments.choices)
        entries = [{**summary(own.compiled), **_verdict_as_json(own, arguments.config)} for own in verdicts]
    elif arguments.choices:
        raise usage("--set needs --config")
    else:
        entries = [summary(compiled) for compiled in _shipped()]
    if arguments.format == "json":
        _print_json({"specs": entries}, stdout)
        return 0
    for entry in entries:
        verdict = {None: "", True: ": yes", False: ": no"}[entry.get("accepted")]
        lines = [f"{entry['layout']}{verdict}", f"  {entry['doc']}", f"  file     {printable(entry['file'])}"]
        if arguments.config is None:
            lines += [f"  needs    {', '.join(entry['needs'])}", f"  reads    {', '.join(entry['reads'])}"]
            lines += [f"  choices  {', '.join(entry['choices'])}"]
        lines += [f"  - {printable(reason)}" for reason in entry.get("reasons", ())]
        lines += [f"  - warning: {printable(warning)}" for warning in entry.get("warnings", ())]
        stdout.write("\n".join(lines) + "\n")
    return 0


def _shipped() -> list[Compiled]:
    """The shipped layouts."""
    from kvgen.shipped import read_shipped, shipped_specs

    found = _compile_all(shipped_specs(), lambda _: read_shipped)
    return [compiled for compiled in found if compiled.layout is not None]


@dataclass(frozen=True)
class Verdict:
    """What a shipped layout makes of a config and choices: the layout of them, or why there is none."""

    compiled: Compiled
    layout: Any
    failure: Failure | None = None
    by_default: bool = True  # whether it takes the config, with the choices that it has by itself

    @property
    def reasons(self) -> tuple[str, ...]:
        return () if self.failure is None else tuple(problem.message for problem in self.failure.problems)


def _verdict_as_json(verdict: Verdict, config: str) -> dict[str, Any]:
    warnings = [] if verdict.reasons else _remarks(verdict.compiled, verdict.layout, config)
    return {
        "accepted": not verdict.reasons,
        "reasons": list(verdict.reasons),
        "warnings": [printable(item.message) for item in warnings],
    }


def _judge(config: str, settings: Sequence[str], flag: str = SET) -> list[Verdict]:
    """What each shipped layout makes of a config. Failure for what is wrong with the config or choices for all of them.

    That is a config that cannot be read, a choice that none of them has or that none which has it can take, and a stage
    that the layout of the config has not.
    """
    shipped, given = _shipped(), _settings(settings, flag)
    fields = _read_config(config, shipped[0])
    for name, text in given.items():
        _find_choice(name, text, shipped, flag)
    found: list[Verdict] = []
    misfits: dict[str, Failure] = {}
    having = [compiled for compiled in shipped if set(given) <= {*_choices_of(compiled), *BUILT_IN}]
    for compiled in shipped:
        try:
            choices = _choices(compiled, given, flag)
        except Failure as failure:
            if compiled in having:
                misfits[compiled.layout.name] = failure
            found.append(_refusal(compiled, failure, fields))
            continue
        try:
            found.append(Verdict(compiled, _layout(compiled, fields, choices, config, flag)))
        except Failure as failure:
            if failure.status == 2:
                raise
            found.append(_refusal(compiled, failure, fields))
    if misfits and len(misfits) == len(having):
        first = next(iter(misfits.values()))
        if all(failure.problems == first.problems for failure in misfits.values()):
            raise first
        _raise_if_meant(found)
        notes = tuple(f"{name}: {item.message}" for name, failure in misfits.items() for item in failure.problems)
        raise Failure(2, [Problem("KV410", "no shipped layout takes these choices", Label(NOWHERE), notes=notes)])
    return found


def _refusal(compiled: Compiled, failure: Failure, fields: Mapping[str, Any]) -> Verdict:
    try:
        compiled.namespace.Layout.from_config(fields)
    except compiled.namespace.LayoutError:
        return Verdict(compiled, None, failure, by_default=False)
    return Verdict(compiled, None, failure)


def _raise_if_meant(refusals: Sequence[Verdict]) -> None:
    """What the one layout says that the config is for, if there is one, and that choices alone keep from it."""
    meant = [own.failure for own in refusals if own.by_default and own.failure is not None]
    if len(meant) == 1:
        raise meant[0]


def _pick(config: str, settings: Sequence[str], flag: str = SET) -> tuple[Compiled, Any]:
    """The one shipped layout that a config is for, and the layout of it. Failure where there is not one."""
    verdicts = _judge(config, settings, flag)
    accepted = [own for own in verdicts if own.failure is None]
    if len(accepted) == 1:
        return accepted[0].compiled, accepted[0].layout
    if not accepted:
        _raise_if_meant(verdicts)
    message = "no shipped layout is for this config"
    if accepted:
        names = ", ".join(own.compiled.layout.name for own in accepted)
        message = f"more than one layout is for this config: {names}"
    refusals = () if accepted else verdicts
    notes = tuple(f"{own.compiled.layout.name}: {reason}" for own in refusals for reason in own.reasons)
    help = "name a spec; `kvgen specs` lists the shipped ones"
    raise Failure(1, [Problem("KV406", message, Label(Span.of_file(config)), notes=notes, help=help)])


def _schema(arguments: argparse.Namespace, stdin: IO[bytes], stdout: IO[str], stderr: IO[str]) -> int:
    from kvgen.schema import load_schema

    _print_json(load_schema(), stdout)
    return 0


# -- specs, configs and choices


def _compile_given(specs: Sequence[str], stdin: IO[bytes]) -> list[Compiled]:
    """Every spec of a command line compiled."""
    return _compile_all([STDIN if spec == "-" else spec for spec in specs], lambda spec: spec_reader(spec, stdin))


def _compile_all(files: Sequence[str], reader: Callable[[str], Callable[[str], bytes]]) -> list[Compiled]:
    """Every spec compiled, with the reader of it. Failure with the problems of all of them."""
    from kvgen.compile import compile_spec

    found, problems, texts = [], [], {}
    writes: dict[str, str] = {}
    status = 1
    for spec in {os.path.realpath(file): file for file in files}.values():
        try:
            compiled = compile_spec(spec, reader(spec))
        except OSError as error:
            problems += unreadable(spec, error).problems
            status = 2
            continue
        found.append(compiled)
        problems += compiled.problems
        texts.update(compiled.texts)
        if compiled.layout is not None:
            name = compiled.spec.name
            other = writes.setdefault(name.text, spec)
            if other != spec:
                message = f"`{name}` is also the name of the layout in {other}"
                problems.append(Problem("KV402", message, Label(name.span), help="rename one of them", path="layout"))
    if any(problem.severity is Severity.ERROR for problem in problems):
        raise Failure(status, problems, texts)
    return found


def _compile_layout(spec: str, stdin: IO[bytes]) -> Compiled:
    compiled = _compile_given([spec], stdin)[0]
    if compiled.layout is None:
        message = f"`{compiled.spec.name}` is a fragment"
        problem = Problem("KV403", message, Label(compiled.spec.name.span), help="name a layout that includes it")
        raise Failure(1, [problem], compiled.texts)
    return compiled


def _resolve(compiled: Compiled, config: str, settings: Sequence[str], flag: str = SET) -> Any:
    """The layout of a config file and choices as K=V; `flag` is what stands in front of each on the command line."""
    choices = _choices(compiled, _settings(settings, flag), flag)
    return _layout(compiled, _read_config(config, compiled), choices, config, flag)


def _read_config(config: str, compiled: Compiled) -> Mapping[str, Any]:
    """The fields of a config file."""
    from kvgen.evaluate import read_config

    try:
        check_file(config)
        return read_config(compiled.namespace, config)
    except compiled.namespace.LayoutError as error:
        raise _refused(error, config, compiled) from None
    except OSError as error:
        raise unreadable(config, error) from None


def _layout(compiled: Compiled, fields: Mapping[str, Any], choices: Mapping[str, Any], config: str, flag: str) -> Any:
    """The layout of the fields of a config file and of choices."""
    try:
        return compiled.namespace.Layout.from_config(fields, **choices)
    except compiled.namespace.LayoutError as error:
        if all(problem.startswith("start_layer ") for problem in error.problems):
            raise usage(f"{flag.strip()}: {error.problems[0]}" if flag else error.problems[0]) from None
        raise _refused(error, config, compiled) from None


def _remarks(compiled: Compiled, layout: Any, config: str) -> list[Problem]:
    """What is to be said of an accepted config: fields that its layout does not know, and the notes of the spec."""
    return [*_unknown_fields(compiled, config), *_notes(layout, config)]


def _notes(layout: Any, config: str) -> list[Problem]:
    """KV409: what a layout says of a config and choices."""
    from kvgen.evaluate import notes_of

    label = Label(Span.of_file(config))
    return [Problem("KV409", text, label, severity=Severity.WARNING) for text in notes_of(layout)]


def _unknown_fields(compiled: Compiled, config: str) -> list[Problem]:
    """KV407: what an accepted config says about a cache that its layout does not know; of a file, not of a pipe."""
    from kvgen.fields import as_text, known_fields, unknown_fields

    if not Path(config).is_file():
        return []  # it was read, and cannot be again
    fields = unknown_fields(json.loads(Path(config).read_text(encoding="utf-8")), known_fields(compiled.spec))
    help = "read it under `config` of the spec, or say under `ignores` why it does not matter"
    return [
        Problem(
            "KV407",
            f"{quote(name)} is {as_text(value)}, and the layout {compiled.layout.name} does not know the field",
            Label(Span.of_file(config)),
            severity=Severity.WARNING,
            help=help,
        )
        for name, value in fields.items()
    ]


def _refused(error: Any, config: str, compiled: Compiled) -> Failure:
    """What a `LayoutError` says, as problems of the config, with what of the spec each is about."""
    from kvgen.origins import labels_of

    problems = [
        Problem("KV401", problem, Label(Span.of_file(config)), secondary=labels_of(compiled.spec, error, problem))
        for problem in error.problems
    ]
    return Failure(1, problems, compiled.texts)


RANKS = "tp_size"  # what layouts that divide heads call the choice
BUILT_IN = ("role", "start_layer", "end_layer")  # choices of every layout


def _settings(settings: Sequence[str], flag: str) -> dict[str, str]:
    """The names and texts of choices as K=V."""
    found: dict[str, str] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        where = f"{flag}{setting}"
        if not equals:
            raise usage(f"{where}: expected K=V")
        if name in found:
            raise usage(f"{where}: `{name}` is set twice")
        found[name] = text
    return found


def _choices_of(compiled: Compiled) -> dict[str, Parameter]:
    return {item.name.text: item for item in compiled.spec.parameters if item.section == "choices"}


def _find_choice(name: str, text: str, among: Sequence[Compiled], flag: str) -> None:
    """Failure where none of these layouts has a choice of that name."""
    from kvgen.types import suggest

    known = list(dict.fromkeys([*(own for compiled in among for own in _choices_of(compiled)), *BUILT_IN]))
    if name in known:
        return
    if any(item.name.text == name for compiled in among for item in compiled.spec.parameters):
        raise usage(f"{flag}{name}={text}: `{name}` is a fact of the model, read from its config")
    help = suggest(name, known) or f"the choices are {', '.join(known)}"
    if name == RANKS and not any("shard(" in text for compiled in among for text in compiled.texts.values()):
        help = "the layout divides nothing over ranks: each of them keeps all that is priced"
    raise usage(f"{flag}{name}={text}: unknown choice `{name}`", help)


def _choices(compiled: Compiled, settings: Mapping[str, str], flag: str) -> dict[str, Any]:
    """The choices of a layout, each of its type."""
    from kvgen.check import why_outside
    from kvgen.types import suggest

    parameters = _choices_of(compiled)
    found: dict[str, Any] = {}
    for name, text in settings.items():
        where = f"{flag}{name}={text}"
        _find_choice(name, text, [compiled], flag)
        parameter = parameters.get(name)
        if name == "role":
            if text not in ("target", "draft", "both"):
                raise usage(f"{where}: `role` is target, draft or both")
            found[name] = text
        elif parameter is None:
            found[name] = _count(text, f"{flag}{name}")
        else:
            found[name] = _typed(parameter, text, where)
            why = why_outside(parameter, found[name])
            if why is not None:
                words = [str(value) for _, value in parameter.values or ()]
                raise usage(f"{where}: `{text}` {why}", suggest(text, words))
    return found


def _as_text(value: object) -> str:
    """The text that `_typed` reads as the value."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _typed(parameter: Parameter, text: str, where: str) -> Any:
    """A choice from its text; a list has commas between its elements."""
    kind = parameter.kind
    if kind == "list":
        texts = all(isinstance(value, str) for _, value in parameter.values or ((0, 0),))
        return tuple(_scalar("text" if texts else "int", part.strip(), where) for part in text.split(",") if text)
    return _scalar(kind, text, where)


def _scalar(kind: str, text: str, where: str) -> Any:
    try:
        match kind:
            case "int":
                return int(text) if re.fullmatch(r"-?\d{1,19}", text, re.ASCII) else _no(text)
            case "ratio":
                return Fraction(text) if re.fullmatch(r"-?\d{1,18}([./]\d{1,18})?", text, re.ASCII) else _no(text)
            case "bool":
                return {"true": True, "false": False}[text]
    except (ValueError, KeyError, ZeroDivisionError):
        wanted = {"int": "an integer", "ratio": "a number such as 1/2", "bool": "true or false"}[kind]
        raise usage(f"{where}: expected {wanted}") from None
    return text


def _no(text: str) -> NoReturn:
    raise ValueError(text)


COUNT_MAX = 10**18 - 1  # of tokens, requests and the like


def _count(text: str, what: str, least: int = 0) -> int:
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII) or int(text) < least:
        most = f" and at most {COUNT_MAX}" if re.fullmatch(r"\d{19,}", text, re.ASCII) else ""
        raise usage(f"{what}: expected an integer of at least {least}{most}, found `{printable(text)}`")
    return int(text)


UNITS = {"": 1, "B": 1}
UNITS |= {f"{letter}iB": 2 ** (10 * power) for power, letter in enumerate("KMGT", start=1)}
UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("kMGT", start=1)}


def size_in_bytes(text: str) -> int:
    """`80GiB`, `1.5 TB` or a plain number of bytes, exactly. Failure where it is no whole number of bytes."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)", text.strip(), re.ASCII)
    if match is None or match[2] not in UNITS:
        raise usage(
            f"`{printable(text)}` is not a size", "write an integer, or KiB MiB GiB TiB kB MB GB TB, as in 80GiB"
        )
    size = Fraction(match[1]) * UNITS[match[2]]
    if size.denominator != 1:
        raise usage(f"`{text}` is not a whole number of bytes")
    return int(size)


# -- files


def _text_of(path: Path) -> str | None:
    try:
        return current(path)
    except OSError as error:
        raise unreadable(str(path), error) from None


def _unmade(folder: Path, texts: Mapping[Path, str], specs: Sequence[str]) -> list[Path]:
    if "-" in specs:
        return []
    try:
        return unmade(folder, set(texts), specs)
    except OSError as error:
        raise unreadable(str(folder), error) from None


def _foreign(path: Path) -> Problem:
    """KV411: a file in the place of a module, which may be the only copy of somebody's work."""
    message = f"kvgen did not write `{path}`, and does not replace it"
    help = "write to another folder with `-o`, rename the layout, or add `--force` to replace the file"
    return Problem("KV411", message, Label(Span.of_file(str(path))), help=help)


def _write(texts: Mapping[Path, str], folder: Path) -> None:
    """Write modules into a folder."""
    path = folder
    try:
        with writing_to(folder):
            for path in sorted(texts):
                replace_file(path, texts[path])
    except OSError as error:
        raise unreadable(str(path), error, "write") from None


def _diff(old: str | None, new: str | None, path: Path) -> str:
    name = printable(path.as_posix())
    files = ("/dev/null" if text is None else name for text in (old, new))
    return "".join(difflib.unified_diff(_printable_lines(old or ""), _printable_lines(new or ""), *files))


def _printable_lines(text: str) -> list[str]:
    """The lines of a text, made printable, each with its line feed; it is said where the last one has none."""
    *lines, last = text.split("\n")
    shown = [f"{printable(line)}\n" for line in lines]
    return [*shown, f"{printable(last)}\n\\ No newline at end of file\n"] if last else shown


# -- printing


def _report(problems: Sequence[Problem], texts: Mapping[str, str], form: str, stdout: IO[str], stderr: IO[str]) -> None:
    ordered = sort_problems(problems)
    if form == "json":
        _print_json({"problems": render_json(ordered)}, stdout)
    elif form == "concise":
        stderr.write(render_concise(ordered))
    else:
        stderr.write(render_text(ordered, texts))


def _print_json(document: object, stdout: IO[str]) -> None:
    stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
