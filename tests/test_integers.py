"""Numbers and tensors that servers hand over: integers of numpy, more bytes than a tensor can have, other layouts."""

import enum
import json
import os
import pickle
import sys
from typing import Any

import numpy
import pytest
import torch
from support.models import ROOT

sys.path.insert(0, str(ROOT))
from generated import gqa, hybrid_swa, mla

CONFIG = {"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 512}
WINDOWS = json.loads((ROOT / "tests" / "data" / "configs" / "gpt-oss-120b.json").read_text())
INTEGERS = (numpy.int64, numpy.int32, numpy.uint8)


class Size(enum.IntEnum):
    PAGE = 64
    LAYERS = 2


def made_of_numpy(config: Any, kind: type) -> Any:
    """The config with integers of numpy, also in lists."""
    if isinstance(config, dict):
        return {name: made_of_numpy(value, kind) for name, value in config.items()}
    if isinstance(config, list):
        return [made_of_numpy(value, kind) for value in config]
    return kind(config) if type(config) is int else config


@pytest.mark.parametrize("module", [mla, gqa, hybrid_swa], ids=lambda module: module.__name__)
def test_integers_of_numpy_are_integers_in_a_config(module: Any) -> None:
    config = {mla: CONFIG, gqa: HEADS, hybrid_swa: WINDOWS}[module]
    plain = module.Layout.from_config(config)
    layout = module.Layout.from_config(made_of_numpy(config, numpy.int64))
    assert layout == plain and repr(layout) == repr(plain) and layout.fingerprint == plain.fingerprint
    assert pickle.dumps(layout) == pickle.dumps(module.Layout.from_config(dict(config)))
    assert json.dumps(layout.config_used) == json.dumps(plain.config_used)


@pytest.mark.parametrize("kind", [*INTEGERS, Size], ids=lambda kind: kind.__name__)
def test_so_they_are_as_choices(kind: Any) -> None:
    plain = mla.Layout.from_config(CONFIG, page_size=64, start_layer=0, end_layer=2)
    layout = mla.Layout.from_config(CONFIG, page_size=kind(64), start_layer=0, end_layer=kind(2))
    assert repr(layout) == repr(plain) and layout.fingerprint == plain.fingerprint
    assert {type(layout.page_size), type(layout.end_layer)} == {int}


@pytest.mark.parametrize("kind", [numpy.int64, numpy.int32], ids=lambda kind: kind.__name__)
def test_so_they_are_as_counts_and_bytes(kind: Any) -> None:
    layout = mla.Layout.from_config(CONFIG)
    page = 64 * 1152 * 2  # of both layers
    assert mla.bytes_for(layout, kind(128)) == 3 * page and type(mla.bytes_for(layout, kind(128))) is int
    assert mla.bytes_for(layout, 2**40) == mla.bytes_for(layout, numpy.int64(2**40)) == (2**34 + 1) * page
    assert mla.host_bytes_for(layout, kind(128)) == 0
    assert mla.slots(layout, "token", kind(128)) == 192
    assert (
        mla.max_tokens(layout, kind(3 * page), kind(0)) == 128 and type(mla.max_tokens(layout, kind(3 * page))) is int
    )
    assert mla.max_requests(layout, kind(3 * page), kind(64)) == 2**62
    pool = mla.Pool(layout, kind(128), "meta", requests=kind(1))
    assert (pool.num_bytes(), type(pool.tokens), type(pool.requests)) == (3 * page, int, int)
    assert mla.Pool(layout, 64).describe_staging(kind(2)) == mla.Pool(layout, 64).describe_staging(2)


def test_a_config_that_is_a_pipe_is_not_waited_for(tmp_path: Any) -> None:
    path = tmp_path / "config.json"
    os.mkfifo(path)
    with pytest.raises(mla.LayoutError) as error:
        mla.Layout.from_config(path)
    assert str(error.value) == f"mla: {path} is not a file"


@pytest.mark.parametrize("kind", [*INTEGERS, Size], ids=lambda kind: kind.__name__)
def test_so_they_are_as_layers_and_ranks(kind: Any) -> None:
    pool = mla.Pool(mla.Layout.from_config({**CONFIG, "num_hidden_layers": 3}), 64, rank=kind(2))
    assert pool.rank == 2 and type(pool.rank) is int
    slots, latent, rope = torch.arange(64, 66), torch.ones(2, 512).bfloat16(), torch.ones(2, 64).bfloat16()
    pool.set_mla_kv_buffer(kind(2), slots, latent, rope)
    assert torch.equal(pool.get_mla_kv_buffer(2, slots)[0][:, 0], latent)
    assert pool.buffer("kv", kind(2)) is pool.buffer("kv", 2)
    with pytest.raises(ValueError, match="^layer_id must be an integer, not True$"):
        pool.get_mla_kv_buffer(True, slots)


@pytest.mark.parametrize("value", [True, numpy.bool_(True), 64.0, numpy.float64(64), "64", torch.tensor(64)], ids=repr)
def test_nothing_else_is_an_integer(value: Any) -> None:
    layout = mla.Layout.from_config(CONFIG)
    with pytest.raises(ValueError, match="^tokens must be an integer, not "):
        mla.bytes_for(layout, value)
    with pytest.raises(ValueError, match="^available_bytes must be an integer, not "):
        mla.max_tokens(layout, value)
    with pytest.raises(ValueError, match="page_size: expected "):
        mla.Layout.from_config(CONFIG, page_size=value)
    with pytest.raises(ValueError, match="num_hidden_layers: expected an integer, found "):
        mla.Layout.from_config({**CONFIG, "num_hidden_layers": value})


@pytest.mark.parametrize("tokens", [2**53, 2**55, 2**70])
def test_more_bytes_than_a_tensor_can_have_are_refused(tokens: int) -> None:
    """A row of 1,152 bytes for each token, and for the 64 slots that are reserved."""
    layout = mla.Layout.from_config(CONFIG)
    nbytes = (tokens + 64) * 1152
    assert mla.bytes_for(layout, tokens) == 2 * nbytes
    with pytest.raises(ValueError) as error:
        mla.Pool(layout, tokens, "meta")
    assert str(error.value) == f"`kv` has {nbytes} bytes in layer 0, and a tensor at most 9223372036854775807"


def test_as_many_as_it_can_have_are_taken() -> None:
    layout = mla.Layout.from_config(CONFIG)
    tokens = ((2**63 - 1) // (1152 * 64) - 1) * 64
    pool = mla.Pool(layout, tokens, "meta")
    assert pool.num_bytes() == 2 * (tokens + 64) * 1152


# Tensors of other kinds


def test_sparse_tensors_are_refused() -> None:
    pool = mla.Pool(mla.Layout.from_config(CONFIG), 64)
    latent, rope = torch.ones(2, 1, 512, dtype=torch.bfloat16), torch.ones(2, 1, 64, dtype=torch.bfloat16)
    loc = torch.tensor([64, 65])
    pool.set_mla_kv_buffer(0, loc, latent, rope)
    with pytest.raises(ValueError, match="^cache_k_nope must be a dense tensor, not torch.sparse_coo$"):
        pool.set_mla_kv_buffer(0, loc, latent.to_sparse(), rope)
    with pytest.raises(ValueError, match="^loc must be a dense tensor, not torch.sparse_coo$"):
        pool.set_mla_kv_buffer(0, loc.to_sparse(), latent, rope)


def own_memory(name: str, layer: int, nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes + 64, dtype=torch.uint8)[:nbytes]


@pytest.mark.parametrize("allocate", [None, own_memory], ids=["zeros", "allocate"])
def test_a_pool_made_in_inference_mode_is_written_to_outside_it(allocate: Any) -> None:
    latent, rope = torch.ones(1, 1, 512, dtype=torch.bfloat16), torch.ones(1, 1, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        pool = mla.Pool(mla.Layout.from_config(CONFIG), 64, allocate=allocate)
        pool.set_mla_kv_buffer(0, torch.tensor([64]), latent, rope)
    pool.set_mla_kv_buffer(0, torch.tensor([65]), latent, rope)
    pool.move_kv_cache(torch.tensor([66]), torch.tensor([65]))
    pool.clear_pages(torch.tensor([0]))
    rows = pool.get_key_buffer(0)
    assert [bool(rows[slot].any()) for slot in (63, 64, 65, 66, 67)] == [False, True, True, True, False]
    assert not any(memory.is_inference() for memory in (pool.buffer("kv", 0), pool.buffer("kv", 1)))
