"""The whole compiler, passes in order: source -> spec -> check -> layout -> emit, then the expectations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

from kvgen.check import check_spec
from kvgen.emit import Module, emit
from kvgen.evaluate import run
from kvgen.expect import prove
from kvgen.layout import Layout, resolve
from kvgen.problems import Problem, Severity
from kvgen.scope import Scope
from kvgen.spec import Spec, load_spec


@dataclass(frozen=True)
class Compiled:
    """What compiling one spec came to. A fragment has a spec alone; after an error, nothing here is to be used."""

    file: str
    problems: tuple[Problem, ...]
    texts: Mapping[str, str]  # of every file that was read, for excerpts
    spec: Spec | None = None
    scope: Scope | None = None
    layout: Layout | None = None
    module: Module | None = None
    namespace: ModuleType | None = None  # the layout part of the module, run

    @property
    def failed(self) -> bool:
        return any(problem.severity is Severity.ERROR for problem in self.problems)


def compile_spec(file: str, read: Callable[[str], bytes]) -> Compiled:
    """Compile the spec `file`; `read` gives the bytes of it and of what it includes, or raises OSError."""
    loaded = load_spec(file, read)
    if loaded.spec is None:
        return Compiled(file, loaded.problems, loaded.texts)
    scope, problems = check_spec(loaded.spec)
    if problems:
        return Compiled(file, tuple(problems), loaded.texts)
    if loaded.spec.kind == "fragment":
        return Compiled(file, tuple(prove(scope, None, read)), loaded.texts, loaded.spec)
    layout = resolve(loaded.spec, scope)
    module = emit(layout)
    namespace = run(module)
    problems = prove(scope, namespace, read)
    return Compiled(file, tuple(problems), loaded.texts, loaded.spec, scope, layout, module, namespace)
