"""Adapters: a resolved layout to an engine's own pool class on top of the generated one.

An engine makes a pool by a constructor of its own and calls methods by names of its own. A layout can be that pool if
its operations have those names and its config those fields; `why_not` says what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvgen.emit import class_name, header_file, template
from kvgen.expr import Name
from kvgen.layout import Layout
from kvgen.pysource import Raw, flat, quoted, tuple_of
from kvgen.views import AdapterView


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A pool that an engine knows: what its constructor and its methods need of a layout."""

    title: str
    template: str
    operations: dict[str, str]  # name -> verb
    config: tuple[str, ...]  # fields that arguments of the constructor stand for
    choice: str  # what decides the bytes of a row


ENGINES = {
    "sglang": Kind(
        title="the DSA pool of SGLang",
        template="sglang.py.jinja",
        operations={
            "set_mla_kv_buffer": "store",
            "get_mla_kv_buffer": "load",
            "get_key_buffer": "view",
            "set_index_k_scale_buffer": "put",
            "get_index_k_scale_buffer": "gather",
            "get_index_k_with_scale_buffer": "view",
            "get_contiguous_buf_infos": "describe",
            "get_state_buf_infos": "describe",
        },
        config=(
            "num_hidden_layers",
            "kv_lora_rank",
            "qk_rope_head_dim",
            "index_head_dim",
            "index_kpool",
            "indexer_types",
        ),
        choice="kv_format",
    )
}


def adapt(layout: Layout, engine: str) -> str:
    """The text of the adapter of a layout that `why_not` finds nothing missing in."""
    kind = ENGINES[engine]
    operations = {item.name: item for item in layout.operations}
    by_verb = {item.verb: item.name for item in layout.operations}
    choice = next(item for item in layout.parameters if item.name.text == kind.choice)
    formats = tuple_of([Raw(quoted(str(named))) for _, named in choice.values or ()])
    file = header_file(layout.file)
    store = operations["set_mla_kv_buffer"]
    view = AdapterView(
        name=layout.name,
        class_name=class_name(layout.name),
        file=file,
        header_gap=" " if len(file) < 20 else "\n# ",
        formats=flat(formats),
        latent_buffer=store.buffers[0],
        latent_field=store.fields[0],
        index_buffer=operations["get_index_k_with_scale_buffer"].buffers[0],
        move=by_verb["move"],
        save=by_verb["save"],
        restore=by_verb["restore"],
    )
    return template(kind.template).render(a=view)


def why_not(layout: Layout, engine: str) -> tuple[str, ...]:
    """What a layout lacks to be the engine's pool, a line for each."""
    return tuple(_missing(layout, ENGINES[engine]))


def _missing(layout: Layout, kind: Kind) -> Iterator[str]:
    operations = {item.name: item.verb for item in layout.operations}
    for name, verb in kind.operations.items():
        if operations.get(name) != verb:
            yield f"no operation `{name}` that is a {verb}"
    fields = {source.name for item in layout.parameters for source in item.sources if isinstance(source, Name)}
    for name in kind.config:
        if name not in fields:
            yield f"no field of the config from `{name}`"
    if not any(item.name.text == kind.choice and item.values for item in layout.parameters):
        yield f"no choice `{kind.choice}` of several formats"
