"""One side of a comparison, or a model beside another: a spec, a config and choices in one word of a command line."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.problems import quote

CONFIG = "config="
FORM = "a side is SPEC[,config=FILE][,K=V]..., or config=FILE[,K=V]... for the shipped layout that a config is for"


class SideError(ValueError):
    """A text that is no side."""


@dataclass(frozen=True)
class Side:
    """A layout as a command line names it; without a spec, the shipped one that the config is for."""

    spec: str | None
    config: str | None
    settings: tuple[str, ...]  # "K=V", as `--set` takes them

    def __post_init__(self) -> None:
        if self.spec is None and self.config is None:
            raise SideError("a side needs a spec or a config")


def parse_side(text: str) -> Side:
    """The side that a text `SPEC[,config=FILE][,K=V]...` names. SideError where it names none.

    What has no `=` goes on with the setting before it, whose value is a list: `SPEC,layers=0,4,8`.
    """
    first, *rest = text.split(",")
    spec, parts = (None, [first, *rest]) if first.startswith(CONFIG) else (first, rest)
    if spec == "":
        raise SideError(f"{text}: expected a spec in front of the first comma" if text else "expected a spec")
    configs: list[str] = []
    settings: list[str] = []
    for part in parts:
        if part.startswith(CONFIG):
            configs.append(part.removeprefix(CONFIG))
        elif part.partition("=")[1]:
            settings.append(part)
        elif settings:
            settings[-1] += f",{part}"
        else:
            raise SideError(f"{text}: expected K=V, found {quote(part)}")
    if len(configs) > 1:
        raise SideError(f"{text}: `config` is given twice")
    if "" in configs:
        raise SideError(f"{text}: expected a file behind `config=`")
    return Side(spec, configs[0] if configs else None, tuple(settings))
