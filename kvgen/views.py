"""What the templates print: one frozen view of a module, every attribute text or a truth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ChoiceView:
    name: str
    annotation: str


@dataclass(frozen=True, kw_only=True)
class ConstantPageView:
    origin: str
    assignment: str


@dataclass(frozen=True, kw_only=True)
class PageFunctionView:
    name: str
    format: str
    origin: str
    signature: str
    locals: tuple[str, ...]
    checks: tuple[str, ...]
    result: str


@dataclass(frozen=True, kw_only=True)
class RuleView:
    """A rule of a set; one that always applies has no head."""

    head: str
    assignment: str
    is_guarded: bool


@dataclass(frozen=True, kw_only=True)
class StepView:
    """A let that depends on the layer (a function), a set of one rule, or a set of several."""

    is_function: bool = False
    is_set: bool = False
    is_rules: bool = False
    name: str = ""
    origin: str
    annotation: str = ""
    result: str = ""
    assignment: str = ""
    rules: tuple[RuleView, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BlockView:
    """Statements of from_config that hang together, or a function inside it."""

    origin: str
    text: str
    is_function: bool = False


@dataclass(frozen=True, kw_only=True)
class KindsView:
    """Which of the small readers and helpers the module uses."""

    exactly: bool
    fixed: bool
    ratio: bool
    boolean: bool
    renamed: bool
    letters: bool
    text: bool
    list_of: bool
    unless: bool
    divide: bool
    shard: bool
    shards: bool  # of lets, which the layout keeps
    agreed: bool
    at_least_one: bool
    multiple: bool
    aligned: bool


@dataclass(frozen=True, kw_only=True)
class HelpersView:
    """Which conversions the kernels use."""

    e4m3_codes: bool
    e4m3_values: bool
    e8m0_codes: bool
    e8m0_values: bool
    e2m1_codes: bool
    e2m1_values: bool
    i8_codes: bool
    i8_values: bool
    casts: bool  # to e4m3, without a scale
    rounding: bool
    widening: bool


@dataclass(frozen=True, kw_only=True)
class QuantiserView:
    """A way of making codes and scales of blocks."""

    name: str
    kernel: str  # its name among kernels
    doc: str
    kernel_parameters: str
    parameters: str
    floor: str
    ratio: str  # of the largest value to the largest code
    ratios: str
    code: str  # makes codes
    codes: str
    native: str
    whole: str  # the scale that codes are made with, where it is not the one that is stored
    wholes: str
    stored: str
    stored_scales: str
    result: str
    results: str
    has_floor: bool
    has_least: bool  # whether the floor alone leaves scales below 2^-126
    has_zeros: bool  # whether codes may be made with a scale of 0
    has_whole: bool
    is_power: bool
    has_division: bool


@dataclass(frozen=True, kw_only=True)
class CoderView:
    """A way of making codes for a scale that is given."""

    name: str
    kernel: str
    doc: str
    kernel_parameters: str
    code: str
    codes: str
    native: str
    has_division: bool


@dataclass(frozen=True, kw_only=True)
class BlockOfKernelView:
    """What a kernel does with one field."""

    comment: str
    lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class KernelView:
    """A kernel of one verb and format, and its twin in torch."""

    kernel: str
    twin: str
    signature: str
    twin_signature: str
    doc: str
    twin_doc: str
    decorator: str
    rows: tuple[str, ...]
    blocks: tuple[BlockOfKernelView, ...]
    twin_lines: tuple[str, ...]
    result: str
    is_in_order: bool  # whether the values of each field lie in order, side by side
    space_page: str
    uses: frozenset[str]  # names of `HelpersView`
    is_store: bool
    is_load: bool
    is_gather: bool


@dataclass(frozen=True, kw_only=True)
class OperationView:
    """A method of the pool that works on one layer."""

    signature: str
    summary: str
    doc: tuple[str, ...]
    buffers: str
    entry: str  # the method that gives the tensor it works on
    values: tuple[str, ...]
    calls: tuple[str, ...]
    row_fields: str
    is_store: bool
    is_load: bool
    is_gather: bool
    is_pages: bool
    is_rows: bool
    is_fields: bool
    is_describe: bool
    loaded_dtypes: str  # that a load may be asked for; empty where it is none
    loaded_names: str
    has_translation: bool


@dataclass(frozen=True, kw_only=True)
class PoolView:
    """The operations of the pool, and what they need."""

    operations: tuple[OperationView, ...]
    kernels: tuple[KernelView, ...]
    stores: tuple[KernelView, ...]
    loads: tuple[KernelView, ...]
    gathers: tuple[KernelView, ...]
    quantisers: tuple[QuantiserView, ...]
    coders: tuple[CoderView, ...]
    helpers: HelpersView
    pack_signature: str
    unpack_signature: str
    clear_signature: str
    slots_decorator: str
    pages_decorator: str
    slots_lines: tuple[str, ...]
    pages_lines: tuple[str, ...]
    or_shared_rows: str  # what else operations of the whole pool refuse
    or_parted_rows: str
    blank_argument: str
    blocks_of_a_page: str
    move: str
    save: str
    restore: str
    warmups: tuple[str, ...]
    torch_dtypes: str
    integers: str
    constants: str
    value_names: str
    units: str
    given_scales: str
    scales: str
    has_given: bool
    has_owned: bool
    has_sources: bool
    has_values: bool
    has_infos: bool
    has_rows: bool
    has_field_views: bool
    has_index: bool
    has_reads: bool
    is_in_order: bool
    has_torch_dtypes: bool


@dataclass(frozen=True, kw_only=True)
class ModuleView:
    """Everything the templates print, as text or as one truth each."""

    name: str
    class_name: str
    header: str
    doc: str
    byte_map: tuple[str, ...]
    imports: tuple[str, ...]
    fingerprint: str
    constant_pages: tuple[ConstantPageView, ...]
    page_functions: tuple[PageFunctionView, ...]
    has_pieces: bool
    page_identity: str
    num_slots: str
    requests_parameter: str
    requests_argument: str
    layer_page_bytes: str
    physical_slots: str
    pages_multiplier: str
    choices: tuple[ChoiceView, ...]
    choice_docs: tuple[str, ...]
    reads: tuple[str, ...]
    lets: tuple[str, ...]
    early_requires: tuple[str, ...]
    requires: tuple[str, ...]
    num_layers: str
    held: str
    max_layers: str
    max_derived: str  # slots of a page
    layer_steps: tuple[StepView, ...]
    layer_requires: tuple[str, ...]
    readers: tuple[BlockView, ...]
    notes: tuple[str, ...]
    spaces: tuple[BlockView, ...]
    spaces_argument: str
    aliases: tuple[BlockView, ...]
    page_choices: tuple[BlockView, ...]
    buffer_checks: tuple[str, ...]
    buffers: str
    buffer_fingerprint: str
    device_buffers: str
    host_bytes: str
    source_annotation: str
    word_annotation: str
    kinds: KindsView
    has_item_bytes: bool
    item_bytes: str
    has_init: bool
    has_split: bool
    has_align: bool
    has_block: bool
    has_requests: bool
    has_fixed_slots: bool
    has_limits: bool
    has_translation: bool
    has_derived_spaces: bool
    has_walks: bool
    has_constants: bool
    has_field_copies: bool
    has_rows: bool
    field_count: str
    numbering: str
    requests_of_self: str
    entry_records: str
    entry_name_note: str
    aux_note: str
    aux_bytes: str
    blank: str
    blank_bytes: str
    plane_parameter: str
    plane_note: str
    flat_shape: str
    flat_stride: str
    has_flat: bool
    own_plane: str
    owned_class: str
    owned_of: str
    owned_memory: str
    held_class: str
    field_memory: str
    blank_memory: str
    field_offset: str
    held_memory: str
    has_pairs: bool
    has_varying_pages: bool
    has_host: bool
    has_readers: bool
    has_notes: bool
    is_affine: bool
    has_search: bool
    has_layer_requires: bool
    has_open_rules: bool
    has_derived_sources: bool
    has_several_sources: bool
    has_dotted_paths: bool


@dataclass(frozen=True, kw_only=True)
class AdapterView:
    kind: str
    base: str
    name: str
    class_name: str
    header: str
    formats: str  # values of the choice between them, of which the engine may ask for one
    pages: str  # the statement that names the formats of their pages
    buffer: str  # that these are of
    buffers: Mapping[str, str]  # the first of each operation, by the engine's name of the operation
    fields: Mapping[str, str]  # that the engine's arguments are for
    scales: Mapping[str, str]  # what the pool calls the scales of these
    names: Mapping[str, str]  # of operations, by their verbs
    has_page_size: bool
    has_rate: bool
