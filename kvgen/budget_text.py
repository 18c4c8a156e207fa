"""Budgets as text, in at most 100 columns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from kvgen.budget import Budget, OtherWay, other_choices, plain, readers_text, shown
from kvgen.causes import Causes
from kvgen.deployment import UNBOUNDED, Pool
from kvgen.evaluate import memory_of, pages_of
from kvgen.text import WIDTH, ending, wrap

GLUE = "\u00a0"  # a blank at which no line breaks


def render(budgets: tuple[Budget, ...], other: OtherWay | None = None) -> str:
    """The first budget in detail, a line for each stage and each memory where there are several."""
    budget = budgets[0]
    sections = [[*_head(budget)], [*_summary(budget)], _other_way(other) if other is not None else []]
    if len(budgets) > 1:
        sections.append(_memories(budgets))
    if len(budget.deployment.stages) > 1:
        sections.append(_stages(budget))
    sections += [_buffers(budget), [*_readers(budget)], _causes(budget), [*_inputs(budget)]]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _head(budget: Budget) -> Iterator[str]:
    """Which layouts, with their choices; of several stages those of the one that decides."""
    for pool in budget.stage.pools:
        title = f"{pool.name}: " if pool is budget.stage.pools[0] else f"draft {pool.name}: "
        choices = pool.layout.choices.items()
        yield from _facts(title, [f"{key} {shown(value)}" for key, value in choices], margin="")


def _summary(budget: Budget) -> Iterator[str]:
    stages, granule = len(budget.deployment.stages), budget.deployment.granule
    if budget.memory is not None:
        each = f", on each of {stages} devices" if stages > 1 else ""
        yield _figure("memory", budget.memory, f"bytes  {in_units(budget.memory)}{each}")
    decides = f"; stage {budget.deciding} decides" if stages > 1 and budget.memory is not None else ""
    yield _figure("tokens", budget.tokens, f"       a multiple of {granule:,}{decides}")
    if budget.requests or budget.counts_requests:
        yield _figure("requests", budget.requests, "       at a time")
    if budget.context is not None:
        yield _figure("context", budget.context, "       tokens for each of them, in whole pages")
    yield _figure("bytes per token", budget.bytes_per_token)
    yield _figure("fixed", budget.fixed_bytes, f"bytes  {_fixed(budget)}")
    yield _figure("total", budget.total_bytes, f"bytes  {in_units(budget.total_bytes)}")
    if budget.memory is not None:
        left = budget.memory - budget.total_bytes
        yield _figure("left" if left >= 0 else "short", abs(left), "bytes")
    host = budget.stage.host_bytes_for(*budget.counts)
    if host:
        yield _figure("on the host", host, f"bytes  {in_units(host)}, not in the total")
    yield _figure("allocator", budget.allocator_bytes, "bytes  at most, from rounding tensors to 2 MiB; in no total")


def _figure(title: str, number: object, text: str = "") -> str:
    line = f"  {title:<15}  {_count(number):>19} {text}".rstrip()
    return line if len(line) <= WIDTH else "\n".join(wrap(line, later=" " * 4))


def _fixed(budget: Budget) -> str:
    """What the fixed bytes are for."""
    requests = budget.counts[1]
    if not requests or not any(pool.request_layers for pool in budget.affine.pools):
        return "reserved pages"
    return f"reserved pages and {requests:,} request{ending(requests)}"


def _other_way(other: OtherWay) -> list[str]:
    """Which choices were taken and why, and what comes out with the others."""
    taken, instead = {}, {}
    for own, theirs in other.pools:
        for name, value in other_choices(own, theirs).items():
            taken[f"{name} is {shown(own.layout.choices[name])}"] = None
            instead[f"{name}={shown(value)}"] = None
    reason = "requests are counted" if other.counted else "no requests are counted"
    budget, each = other.budget, other.budget.affine.request_bytes
    cost = f" and {_count(each)} per request" if each else ""
    many = f" of {_count(budget.requests)} request{ending(budget.requests)}" if budget.requests else ""
    if many and not any(pool.request_layers for pool in budget.deployment.pools):
        many += " (whatever slots their windows need)"
    facts = [
        f"{_count(budget.tokens)} token{ending(budget.tokens)}{many}",
        f"{_count(budget.bytes_per_token)} bytes per token{cost}",
        f"{shown(budget.total_bytes)} bytes in total{'' if budget.fits else ', which do not fit'}",
    ]
    text = f"{reason}, so {' and '.join(taken)}; with {' and '.join(instead)}: {', '.join(facts)}"
    return wrap(text, "  ", "  ")


def _memories(budgets: Sequence[Budget]) -> list[str]:
    """What each memory holds."""
    columns = {
        "memory": [shown(budget.memory) for budget in budgets],
        "": [in_units(budget.memory or 0) for budget in budgets],
        "tokens": [_count(budget.tokens) for budget in budgets],
    }
    if any(budget.requests or budget.counts_requests for budget in budgets):
        columns["requests"] = [_count(budget.requests) for budget in budgets]
        columns["context"] = ["" if budget.context is None else shown(budget.context) for budget in budgets]
    if len(budgets[0].deployment.stages) > 1:
        columns["stage"] = [str(budget.deciding) for budget in budgets]
    columns["total"] = [shown(budget.total_bytes) for budget in budgets]
    columns["left"] = [shown((budget.memory or 0) - budget.total_bytes) for budget in budgets]
    return _table(list(zip(*([title, *cells] for title, cells in columns.items()), strict=True)), left=0)


def _stages(budget: Budget) -> list[str]:
    """Each stage with its layers, its price, and the tokens that it would hold by itself."""
    rows = [("stage", "layers", "bytes per token", "total", *(("tokens", "") if budget.memory is not None else ()))]
    for position, (stage, limit) in enumerate(zip(budget.deployment.stages, budget.limits, strict=True)):
        titles = ("", *("draft " for _ in stage.pools[1:]))
        layers = [title + _layers(pool) for title, pool in zip(titles, stage.pools, strict=True) if pool.layout.held]
        row = (str(position), ", ".join(layers) or "none", shown(plain(stage.at(*budget.counts).cell_size)))
        row += (shown(stage.bytes_for(*budget.counts)),)
        if limit is not None:
            row += (_count(limit), "decides" if position == budget.deciding else "")
        rows.append(row)
    return _table(rows, left=2)


def _layers(pool: Pool) -> str:
    """The layers of a pool, as `0-38`."""
    held = pool.layout.held
    return f"{held[0]}-{held[-1]}" if len(held) > 1 else str(held[0])


def _buffers(budget: Budget) -> list[str]:
    rows = [("buffer", "space", "layers", "slot bytes", "page bytes", "slots", "bytes")]
    for pool in budget.stage.pools:
        for buffer in pool.layout.buffers:
            if not buffer.layers:
                continue
            pages = pages_of(buffer)
            row = (_name(budget, pool, buffer), buffer.space.name, shown(len(buffer.layers)))
            row += (_varied([page.slot_bytes for page in pages]), _varied([page.page_bytes for page in pages]))
            rows.append((*row, shown(budget.slots(pool, buffer)), shown(buffer.num_bytes(*budget.sizes(buffer)))))
    return _table(rows, left=2)


def _name(budget: Budget, pool: Pool, buffer: object) -> str:
    """A buffer's name, and where it is, unless it is the target's on the device."""
    notes = ["draft"] if pool is not budget.stage.pools[0] else []
    notes += ["host"] if memory_of(buffer) == "host" else []
    return buffer.name + (f" ({', '.join(notes)})" if notes else "")


def _readers(budget: Budget) -> Iterator[str]:
    """Which layers read what another one has, buffer by buffer."""
    title = "readers   "
    for pool in budget.stage.pools:
        for buffer in pool.layout.buffers:
            text = readers_text(buffer)
            if text:
                yield from _facts(title + _name(budget, pool, buffer) + ": ", [text])
                title = " " * len(title)


def _causes(budget: Budget) -> list[str]:
    """What the bytes of each buffer on the device are for, and those of all of them."""
    found = [(_name(budget, pool, buffer), causes) for pool, buffer, causes in budget.device_causes() if buffer.layers]
    if len(found) > 1:
        found.append(("all", budget.total_causes))
    names = [name for name in Causes().as_dict() if any(causes.as_dict()[name] for _, causes in found)]
    rows = [("by cause", *(name.replace("_", " ") for name in names))]
    rows += [(title, *(shown(causes.as_dict()[name]) for name in names)) for title, causes in found]
    return _table(rows, left=1)


def _inputs(budget: Budget) -> Iterator[str]:
    """What was read of each config, and what was taken for fields that are absent."""
    for pool in budget.stage.pools:
        of = "" if pool is budget.stage.pools[0] else f"of draft {pool.name}: "
        used, defaults = (
            [f"{key} {_short(value)}" for key, value in items.items()]
            for items in (pool.layout.config_used, pool.layout.defaults_used)
        )
        yield from _facts(f"config    {of}", used or ["nothing"])
        if defaults:
            yield from _facts(f"defaults  {of}", defaults)


def _table(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Rows in columns, the first `left` of them aligned to the left; as facts in lines where columns are too wide."""
    if len(rows) < 2:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  "
        + "  ".join(
            f"{cell:<{width}}" if column < left else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    if max(map(len, lines)) <= WIDTH:
        return lines
    titles, *others = rows
    lines = []
    for name, *cells in others:
        facts = [f"{title} {cell}".strip() for title, cell in zip(titles[1:], cells, strict=True) if cell]
        lines += _facts(f"{titles[0]} {name}: ", facts)
    return lines


def _count(number: object) -> str:
    return "unbounded" if number == UNBOUNDED else shown(plain(number))


def _varied(values: list[object]) -> str:
    return "by layer" if len(set(values)) > 1 else shown(plain(values[0]))


def _short(value: object) -> str:
    text = json.dumps(plain(value)) if not isinstance(value, str) else value
    return text if len(text) <= 40 else f"[{len(value)} values]" if isinstance(value, list) else f"{text[:37]}..."


def in_units(number: int) -> str:
    """Bytes in the largest unit of which there is one, rounded down."""
    power = min(max(number.bit_length() - 1, 0) // 10, 4)
    if power == 0:
        return "under 1 KiB"
    hundredths = number * 100 // 2 ** (10 * power)
    return f"{hundredths // 100:,}.{hundredths % 100:02} {'KMGT'[power - 1]}iB"


def _facts(title: str, facts: Sequence[str], margin: str = "  ") -> list[str]:
    """Facts behind their title, later lines below the first one; no line breaks inside a fact."""
    text = ", ".join(fact.replace(" ", GLUE) for fact in facts)
    return [line.replace(GLUE, " ") for line in wrap(text, margin + title, " " * len(margin + title))]
