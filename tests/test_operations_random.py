"""Random operations of glm_dsa on the two backends: the same bytes, which are those of the reference.

Inputs are any bits, NaN, infinities, denormals and zeros among them; slots are of both types, of any stride, and mixed
with slots that do not exist. Kernels are interpreted under the sanitizer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.guard import GuardedAllocator
from support.models import model_config
from support.reference import ROW_BYTES, Slots, Twin, bits, hostile_slots, interpreted, one_thread, wild_bf16
from support.sanitizer import Sanitizer

from generated.glm_dsa import Layout, Pool

# Inputs overflow and are signalling NaN on purpose; numpy, in which kernels are interpreted, warns of both.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning:triton.runtime.interpreter")

TOKENS = 64
# Two layers of which the first owns an indexer, and the draft layer.
CONFIG = {
    **model_config("glm-5.2"),
    "num_hidden_layers": 2,
    "indexer_types": ["full", "shared"],
    "index_skip_topk_offset": None,
}
OWNERS = {"kv": (0, 1), "kv_draft": (2,), "index_k": (0, 2)}


@dataclass(frozen=True)
class Case:
    """How a pool is made, and what the tensors look like that its operations take."""

    kv_format: str
    ratio: int
    count: int
    dtype: torch.dtype  # of slots
    slot_stride: int
    columns_before: int  # values are columns of a wider tensor, so many before them and two after,
    column_stride: int  # or every second column
    hostile: bool
    native: bool  # whether kernels cast to e4m3 by an instruction
    seed: int


cases = st.builds(
    Case,
    kv_format=st.sampled_from(list(ROW_BYTES)),
    ratio=st.sampled_from([1, 1, 2, 3]),
    count=st.sampled_from([0, 1, 2, 7, 33, 50, 63, 64, 65]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    slot_stride=st.sampled_from([1, 1, 2, 5]),
    columns_before=st.sampled_from([0, 0, 1, 8, 64]),
    column_stride=st.sampled_from([1, 1, 1, 2]),
    hostile=st.booleans(),
    native=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)


class Inputs:
    """The random tensors of one case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.random = np.random.default_rng(case.seed)

    def one_of(self, *items: object) -> object:
        return items[self.random.integers(len(items))]

    def wide(self, values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        """Unsigned integers [n, width] as the bits of columns of a wider tensor."""
        signed = values.view({1: np.uint8, 2: np.int16, 4: np.int32}[values.itemsize])
        before, stride = self.case.columns_before, self.case.column_stride
        room = np.full((values.shape[0], before + values.shape[1] * stride + 2), -1 if values.itemsize > 1 else 255)
        whole = torch.from_numpy(room.astype(signed.dtype))
        view = whole[:, before : before + values.shape[1] * stride : stride]
        view.copy_(torch.from_numpy(signed))
        return view.view(dtype)

    def bf16(self, width: int) -> torch.Tensor:
        return self.wide(wild_bf16(self.random, self.case.count, width), torch.bfloat16)

    def slots(self, num_slots: int, *, distinct: bool = True) -> torch.Tensor:
        """Slots of a space of so many, and if the case says so some that it does not have."""
        if distinct:
            slots = self.random.permutation(num_slots)[: self.case.count]
        else:
            slots = self.random.integers(0, num_slots, self.case.count)
        slots = slots.astype(np.int64)
        if self.case.hostile:
            bad = np.array(hostile_slots(num_slots, self.case.dtype), np.int64)
            slots = np.where(self.random.random(slots.shape) < 0.3, self.random.choice(bad, slots.shape), slots)
        return self.strided(slots)

    def strided(self, values: np.ndarray) -> torch.Tensor:
        room = torch.zeros((len(values), self.case.slot_stride), dtype=self.case.dtype)
        room[:, 0] = torch.from_numpy(values)
        return room[:, 0]

    def of_the_pool(self, twin: Twin, *, distinct: bool = True) -> Slots:
        """Slots for an operation over the whole pool."""
        spaces = {"logical": twin.index(2).num_slots, "device": twin.latent(0).num_slots}
        if self.case.ratio == 1:
            return self.slots(spaces["logical"], distinct=distinct)
        return {space: self.slots(num_slots, distinct=distinct) for space, num_slots in spaces.items()}


Operation = Callable[[Inputs, Twin], Callable[[Twin], tuple[torch.Tensor, ...] | None]]


def store_latent(inputs: Inputs, twin: Twin) -> Callable[[Twin], None]:
    layer = inputs.one_of(0, 1, 2)
    loc, nope, rope = inputs.slots(twin.latent(layer).num_slots), inputs.bf16(512), inputs.bf16(64)
    options = inputs.one_of({}, {"skip_reserved": False})
    nope = inputs.one_of(nope, nope[:, None])
    return lambda twin: twin.set_mla_kv_buffer(layer, loc, nope, rope, **options)


def load_latent(inputs: Inputs, twin: Twin) -> Callable[[Twin], tuple[torch.Tensor, ...]]:
    layer, dtype = inputs.one_of(0, 1, 2), inputs.one_of(torch.bfloat16, torch.float16, torch.float32)
    loc = inputs.slots(twin.latent(layer).num_slots, distinct=False)
    return lambda twin: twin.get_mla_kv_buffer(layer, loc, dtype)


def store_key(inputs: Inputs, twin: Twin) -> Callable[[Twin], None]:
    layer, options = inputs.one_of(0, 2), inputs.one_of({}, {"skip_reserved": False})
    loc, key = inputs.slots(twin.index(layer).num_slots), inputs.bf16(128)
    return lambda twin: twin.store_index_k(layer, loc, key, **options)


def put_key(inputs: Inputs, twin: Twin) -> Callable[[Twin], None]:
    layer, options = inputs.one_of(0, 2), inputs.one_of({}, {"skip_reserved": False})
    loc, count = inputs.slots(twin.index(layer).num_slots), inputs.case.count
    codes = inputs.wide(inputs.random.integers(0, 256, (count, 128), np.uint8), torch.float8_e4m3fn)
    scales = inputs.wide(inputs.random.integers(0, 1 << 32, (count, 1), np.uint32), torch.float32)
    scales = inputs.one_of(scales, scales[:, 0])
    return lambda twin: twin.set_index_k_scale_buffer(layer, loc, codes, scales, **options)


def gather_keys(inputs: Inputs, twin: Twin) -> Callable[[Twin], tuple[torch.Tensor, ...]]:
    layer, random = inputs.one_of(0, 2), inputs.random
    pages = twin.index(layer).num_pages
    shape = (int(random.integers(0, 6)), int(random.integers(1, 4)))
    table = random.integers(0, pages, shape)
    if inputs.case.hostile:
        bad = np.array(hostile_slots(pages, inputs.case.dtype), np.int64)
        table = np.where(random.random(shape) < 0.3, random.choice(bad, shape), table)
    lengths = random.integers(-2 if inputs.case.hostile else 0, 64 * shape[1] + 1, shape[0])
    known = {"seq_len_sum": int(lengths.clip(0).sum()), "max_seq_len": int(lengths.max(initial=0))}
    sums = inputs.one_of({}, known)
    seq_lens, page_table = inputs.strided(lengths), torch.from_numpy(table).to(inputs.case.dtype)
    return lambda twin: twin.get_index_k_scale_buffer(layer, seq_lens, page_table, **sums)


def move(inputs: Inputs, twin: Twin) -> Callable[[Twin], None]:
    targets, sources = inputs.of_the_pool(twin), inputs.of_the_pool(twin, distinct=False)
    return lambda twin: twin.move_kv_cache(targets, sources)


def offload_and_reload(inputs: Inputs, twin: Twin) -> Callable[[Twin], None]:
    sources, targets = inputs.of_the_pool(twin, distinct=False), inputs.of_the_pool(twin)

    def run(twin: Twin) -> None:
        saved = twin.get_cpu_copy(sources)
        twin.fill(inputs.case.seed + 1)
        twin.load_cpu_copy(saved, targets)

    return run


def clear_pages(inputs: Inputs, twin: Twin) -> Callable[[Twin], None]:
    pages = {}
    for space, memory in (("logical", twin.index(2)), ("device", twin.latent(0))):
        some = [*range(1, memory.num_pages), *hostile_slots(memory.num_pages, inputs.case.dtype)]
        pages[space] = inputs.strided(inputs.random.permutation(np.array(some, np.int64))[: min(inputs.case.count, 2)])
    given = pages["logical"] if inputs.case.ratio == 1 else pages
    return lambda twin: twin.clear_pages(given)


OF_A_LAYER: list[Operation] = [store_latent, load_latent, store_key, put_key, gather_keys]
OF_THE_POOL: list[Operation] = [move, offload_and_reload, clear_pages]  # ten times as slow
operations = st.lists(st.sampled_from(OF_A_LAYER * 4 + OF_THE_POOL), min_size=1, max_size=2)


def twin_of(case: Case, backend: str, sanitizer: Sanitizer | None) -> Twin:
    layout = Layout.from_config(CONFIG, kv_format=case.kv_format, host_to_device_ratio=case.ratio, role="both")
    pool = Pool(layout, TOKENS, allocate=GuardedAllocator("right"), backend=backend)
    pool._native = case.native
    logical, device = case.ratio * TOKENS + 64, TOKENS + 64
    num_slots = {"kv": device, "kv_draft": logical, "index_k": logical}
    return Twin(pool, case.kv_format, OWNERS, num_slots, sanitizer, seed=case.seed)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@settings(max_examples=500, deadline=None)
@given(case=cases, operations=operations)
def test_backends_write_the_same_bytes(case: Case, operations: list[Operation]) -> None:
    with interpreted() as sanitizer:
        twins = twin_of(case, "torch", None), twin_of(case, "triton", sanitizer)
        inputs = Inputs(case)
        for operation in operations:
            run = operation(inputs, twins[0])
            results = [run(twin) or () for twin in twins]
            for one, other in zip(*results, strict=True):
                np.testing.assert_array_equal(bits(one), bits(other))
        for owner in twins[0].memory:
            assert torch.equal(*(twin.pool.buffer(*owner) for twin in twins))
