"""Pairs of pools, SGLang's and the generated one, and the differences that tests of them find."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deployments import DTYPES, E4M3, Deployment, build, build_own, deepseek_v3, glm_5_2, model_of

TOKENS, PAGE = 512, 64
SLOTS = TOKENS + PAGE
# The last layer of the DSA model shares the top-k of the one before it, and has no index keys.
MODELS = {"dsa": glm_5_2(4, indexer_types=["full", "full", "full", "shared"]), "mla": deepseek_v3(4)}
KEYS = {"mha": (64, 64), "mha wide": (192, 128), "mha deep": (64, 192)}  # widths of a head's key and of its value
ADAPTERS = {
    "dsa": "generated.sglang.glm_dsa",
    "mla": "generated.sglang.mla",
    **dict.fromkeys(KEYS, "generated.sglang.gqa"),
}
HEADS = 3
SHARED = 3
DSA = tuple(f"dsa {kv_format}" for kv_format in DTYPES)
MHA = ("mha bf16", "mha fp8", "mha wide bf16", "mha wide fp8")
DIFFERENCES: dict[str, tuple[str, tuple[str, ...]]] = {}  # name of a test -> why it is so, and the pools of which


def difference(why: str, *pools: str) -> Any:
    """Mark a test as that of a difference, and run it with these pools."""

    def remember(test: Any) -> Any:
        DIFFERENCES[test.__name__.removeprefix("test_")] = why, pools
        return of(*pools)(test)

    return remember


def of(*pools: str) -> Any:
    """Run a test with these pools: a kind, and a format of its rows."""
    return pytest.mark.parametrize("pools", pools, indirect=True)


def layer(layer_id: int) -> SimpleNamespace:
    return SimpleNamespace(layer_id=layer_id)


@dataclass(frozen=True)
class Both:
    """SGLang's pool, the generated one, and the same random bytes in both."""

    deployment: Deployment
    own: Any
    generated: Any
    random: np.random.Generator

    def __iter__(self) -> Iterator[Any]:
        return iter((self.own, self.generated))

    def fill(self) -> None:
        for ours, theirs in zip(self.buffers(self.own), self.buffers(self.generated), strict=True):
            noise = torch.from_numpy(self.random.integers(0, 256, ours.nbytes, np.uint8)).view(
                ours.view(torch.uint8).shape
            )
            ours.view(torch.uint8).copy_(noise)
            theirs.view(torch.uint8).copy_(noise)

    def buffers(self, pool: Any) -> list[torch.Tensor]:
        names = ("kv_buffer", "index_k_with_scale_buffer", "k_buffer", "v_buffer")
        return [buffer for name in names for buffer in getattr(pool, name, ())]

    def check(self) -> None:
        """Every byte of every buffer is the same."""
        for ours, theirs in zip(self.buffers(self.own), self.buffers(self.generated), strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))

    def slots(self, count: int, first: int = 1) -> torch.Tensor:
        return torch.from_numpy(self.random.permutation(SLOTS - first)[:count] + first)

    def latent(self, count: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
        """Finite values of many sizes, none of a block all 0 or under 2^-126 * 448."""
        normal = self.random.standard_normal((count, 576)).astype(np.float32)
        values = torch.from_numpy(normal * np.exp(self.random.standard_normal((count, 1)) * 4).astype(np.float32))
        nope, rope = values[:, None].to(dtype).split([512, 64], -1)
        return nope, rope  # strided, as slices of one tensor

    def heads(self, count: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of many sizes, slices of one tensor as projections give them."""
        widths = [HEADS * width for width in (self.own.head_dim, self.own.v_head_dim)]
        normal = self.random.standard_normal((count, sum(widths))).astype(np.float32)
        values = torch.from_numpy(normal * np.exp(self.random.standard_normal((count, 1))).astype(np.float32))
        k, v = values.to(dtype).split(widths, -1)
        return k.unflatten(1, (HEADS, -1)), v.unflatten(1, (HEADS, -1))

    def keys(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of any bits."""
        codes = torch.from_numpy(self.random.integers(0, 256, (count, 128), np.uint8)).view(E4M3)
        return codes, torch.from_numpy(self.random.integers(0, 2**32, count, np.uint32).view(np.float32))


@pytest.fixture(params=DSA)
def pools(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def both(pools: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Both]:
    kind, kv_format = pools.rsplit(" ", 1)
    monkeypatch.setenv("KVGEN_SGLANG_POOL", ADAPTERS[kind])
    if kind in KEYS:
        head_dim, v_head_dim = KEYS[kind]
        model = model_of("llama-3.1-8b", num_key_value_heads=HEADS, head_dim=head_dim, v_head_dim=v_head_dim)
        # as with a draft of several branches, without which SGLang's pool moves nothing
        arguments = (("speculative_algorithm", "EAGLE"),)
        deployment = Deployment(kv_format, start=0, end=4, model=model, arguments=arguments)
    else:
        deployment = Deployment(kv_format, MODELS[kind], 0, 4)
    with deployment.serving() as configurator:
        own, generated = build_own(configurator, TOKENS), build(configurator, TOKENS)
        found = Both(deployment, own, generated, np.random.default_rng(20310))
        found.fill()
        found.check()
        yield found
