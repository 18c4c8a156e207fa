"""Fields of a config that say something about its KV cache, and those of them that a layout does not know.

A layout knows the fields that it reads, whatever it makes of them, and those that its spec `ignores` with a reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from kvgen.expr import names
from kvgen.spec import Spec
from kvgen.text import ending

CACHE_FIELD = re.compile(
    r"""
      ^(num_hidden_layers|num_layers|n_layers?)$
    | ^layer_types$ | ^block_types$ | layers_block_type | ^per_layer_config$ | layer_group_size
    | ^block_configs$ | (?<!size)_per_layer$  # what each layer has of its own
    | hybrid | full_attention_interval | full_attn | global_attn | local_att
    | attn_layer_ | attention_layers$ | attn_type | no_rope_layer  # which layer attends how
    | key_value | attention_groups$ | (^|_)kv_ | head_kv$ | k_eq_v | multi_query
    | head_dim | mla_use_nope  # what a head or latent is
    | sliding | window | chunk_size$  # how far back a layer looks
    | (^|_)index_ | ^indexer_types$ | sparse_att | compress(?!.*theta)
    | shared_layers | source_layer | ^cla_ | ^use_cla$ | cli_factor  # layers that keep nothing of their own
    | ^linear_ | mamba | ssm_ | (^|_)d_(conv|state)$ | conv_kernel | short_conv | state_size | recurrent | lru_ | kda
    | cross_attention | ^is_encoder_decoder$
    | nextn | num_mtp | mtp_\w*layer | ^use_mtp$ | draft | eagle
    """,
    re.VERBOSE,
)
SWITCHES = {"use_sliding_window": "window", "use_mtp": "mtp"}  # false: fields with this word in them say nothing
BESIDE = {"max_window_layers": "sliding_window"}  # says something only where the other is there
NEUTRAL = {"layer_types": ["full_attention"]}  # a list of nothing else says nothing


def known_fields(spec: Spec) -> set[str]:
    """The fields that a layout reads, and those that it ignores; of a path, its first part."""
    return read_fields(spec) | {item.name.text for item in spec.ignores}


def read_fields(spec: Spec) -> set[str]:
    """The fields that a layout reads; of a path, its first part."""
    paths = (name for item in spec.parameters for source in item.sources for name in names(source))
    return {path.partition(".")[0] for path in paths}


def unknown_fields(config: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The fields that say something about a cache and that are not known, with their values.

    They are looked up in the `text_config` first. Null, false, 0 and what is empty say nothing.
    """
    text = config.get("text_config")
    inner = {name: value for name, value in text.items() if value is not None} if isinstance(text, Mapping) else {}
    fields = {**config, **inner}
    found = {name: value for name, value in fields.items() if value and CACHE_FIELD.search(name)}
    found = {name: value for name, value in found.items() if not _is_neutral(name, value)}
    for name, other in BESIDE.items():
        if not fields.get(other):
            found.pop(name, None)
    for switch, word in SWITCHES.items():
        found.pop(switch, None)  # where it is true, what it switches on speaks for itself
        if fields.get(switch) is False:
            off = {name for name in found if word in name}
            found = {name: value for name, value in found.items() if name not in off}
            if not off.isdisjoint(known):
                found[switch] = False
    return {name: value for name, value in found.items() if name not in known}


def _is_neutral(name: str, value: object) -> bool:
    return name in NEUTRAL and isinstance(value, list) and all(item in NEUTRAL[name] for item in value)


def as_text(value: object) -> str:
    """A value of a config in at most 40 characters; of lists and mappings, how much is in them."""
    match value:
        case list():
            return f"[{len(value)} value{ending(len(value))}]"
        case dict():
            return f"{{{len(value)} field{ending(len(value))}}}"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
