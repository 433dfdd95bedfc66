"""The memory breakdown at a step's peak: by kind, by module, by source line, and over time.

Rules:
- Each list is a partition: its parts add up to the peak, byte for byte.
- Bytes are those of the allocator's blocks (`GRAIN`), as `max_memory_allocated` counts them.
- Alike modules are reported together ("transformer.h.*"): siblings of one class and about one size. A
  module is opened as long as it holds much and its children say more; repeated ones are opened inside
  (`parts`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import final

from batchfit._engine.allocator.caching import GRAIN
from batchfit._engine.allocator.footprint import KINDS, OPTIONAL, STATE, Origin, Trace

POINTS = 200  # of a timeline
_OPENED_SHARE = 0.05  # a module that holds less of the peak is not reported by its parts
_ROWS = 12
_INSIDE = 6
_ALIKE = 2.0  # blocks of one class are alike if their weights are within this ratio of the middle one's


@final
@dataclass(frozen=True, slots=True)
class PeakPart:
    """A part of the peak."""

    name: str
    size: int
    blocks: int
    kinds: dict[str, int]
    operations: tuple[str, ...] = ()
    repeats: int = 1
    parts: tuple[PeakPart, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Peak:
    """The highest moment of a trace's last step, and the blocks that are live then."""

    trace: Trace
    moment: int
    live: tuple[int, ...]

    @classmethod
    def of(cls, trace: Trace) -> Peak:
        begin = _last_begins(trace)
        total, best = 0, -1
        moment = max(begin - 1, 0)
        for position, event in enumerate(trace.events):
            total += grained(trace.sizes[event]) if event >= 0 else -grained(trace.sizes[~event])
            if position >= begin and total > best:
                best, moment = total, position
        return cls(trace, moment, tuple(trace.live_after(moment + 1)))

    @property
    def size(self) -> int:
        return sum(self.size_of(block) for block in self.live)

    @property
    def origin(self) -> Origin:
        """Of the block that made it the peak."""
        event = self.trace.events[self.moment]
        return self.trace.origins[event if event >= 0 else ~event]

    def size_of(self, block: int) -> int:
        return grained(self.trace.sizes[block])

    def held(
        self, name: str, blocks: Iterable[int], *, repeats: int = 1, parts: tuple[PeakPart, ...] = ()
    ) -> PeakPart:
        """These blocks as one part of the peak."""
        chosen = list(blocks)
        kinds: Counter[str] = Counter()
        operations: Counter[str] = Counter()
        for block in chosen:
            origin = self.trace.origins[block]
            kinds[origin.kind] += self.size_of(block)
            if origin.kind not in STATE and origin.operation:
                operations[short_operation(origin.operation)] += self.size_of(block)
        return PeakPart(
            name,
            sum(kinds.values()),
            len(chosen),
            {kind: kinds[kind] for kind in KINDS if kind in kinds},
            tuple(operation for operation, _ in operations.most_common(3)),
            repeats,
            parts,
        )


def highest_moments(peak: Peak, *, key: Callable[[int], object], most: int, share: float) -> list[Peak]:
    """The highest moment of each phase of the last step, and of what else is high: the highest first.

    `key` says of a block what it has made high (a line): of each, and each phase, the highest moment counts,
    if it reaches that share of the peak. There are at most so many, but one of each phase. A block that is
    freed says nothing about the phase.
    """
    trace = peak.trace
    total = 0
    best: dict[tuple[str, object], tuple[int, int]] = {}
    begin = _last_begins(trace)
    for position, event in enumerate(trace.events):
        total += grained(trace.sizes[event]) if event >= 0 else -grained(trace.sizes[~event])
        if position >= begin and event >= 0 and (total >= share * peak.size or not best):
            place = phase_of(trace.origins[event]), key(event)
            if total > best.get(place, (-1, 0))[0]:
                best[place] = (total, position)
    ranked = sorted(best.items(), key=lambda item: (-item[1][0], item[1][1]))
    seen: set[str] = set()
    moments: list[int] = []
    for (phase, _), (_, position) in ranked:
        if len(moments) < most or phase not in seen:
            seen.add(phase)
            moments.append(position)
    return [Peak(trace, one, tuple(trace.live_after(one + 1))) for one in moments or [peak.moment]]


def phase_of(origin: Origin) -> str:
    """The phase that a block is made in."""
    return "forward" if origin.phase == "batch" else origin.phase


def grained(size: int) -> int:
    """What the allocator gives for that many bytes."""
    return -(-size // GRAIN) * GRAIN


def short_operation(operation: str) -> str:
    """`log_softmax` for `aten._log_softmax.default`."""
    plan = operation.startswith(OPTIONAL)
    plain = operation.removeprefix(OPTIONAL).removeprefix("aten.").split(".")[0].lstrip("_")
    plain = "to" if plain == "to_copy" else plain  # as people write it
    return f"{plain} plan" if plan else plain


def by_kind(peak: Peak) -> list[PeakPart]:
    """In the order in which people ask (`KINDS`)."""
    groups = _grouped(peak, lambda origin: origin.kind)
    return [peak.held(kind, groups[kind]) for kind in KINDS if kind in groups]


def by_line(peak: Peak) -> list[PeakPart]:
    """Source lines, the most first; what has no line goes by what it is."""
    return _ranked(peak.held(name, blocks) for name, blocks in _grouped(peak, _line).items())


def _line(origin: Origin) -> str:
    if origin.kind in STATE:  # their origin names a tensor: the module is what comes before
        return "optimizer state" if origin.kind == "optimizer" else origin.kind
    if origin.kind == "batch":
        return "batch"
    if origin.source:
        return origin.source
    if origin.phase == "optimizer":
        return "optimizer step"
    operation = short_operation(origin.operation)
    return f"{operation} workspaces" if origin.kind == "workspaces" else f"{operation} in {origin.phase}"


def timeline(trace: Trace, points: int = POINTS) -> list[tuple[int, str, dict[str, int]]]:
    """Live bytes by kind over the last step, with the highest moment: (event, phase, bytes by kind).

    Each of `points` stretches of equal length is shown at its highest moment.
    """
    begin, end = _last_begins(trace), len(trace.events)
    stretch = max(1.0, (end - begin) / points)
    live: Counter[str] = Counter()
    found: list[tuple[int, str, dict[str, int]]] = []
    best, last = -1, -1
    for position, event in enumerate(trace.events):
        block = event if event >= 0 else ~event
        origin = trace.origins[block]
        live[origin.kind] += grained(trace.sizes[block]) * (1 if event >= 0 else -1)
        if position < begin:
            continue
        number = int((position - begin) / stretch)
        total = sum(live.values())
        if number == last and total <= best:
            continue
        # A block that is freed says nothing about the phase: it may come from an earlier one.
        phase = origin.phase if event >= 0 else (found[-1][1] if found else "batch")
        moment = (position - begin, phase, {kind: live[kind] for kind in KINDS if live[kind]})
        if number == last:
            found[-1] = moment
        else:
            found.append(moment)
        best, last = total, number
    return found


# -- modules


@final
@dataclass(slots=True)
class _Node:
    """A module, or several alike; `own` are the blocks that belong to none of its children."""

    name: str
    own: list[int] = field(default_factory=list)
    children: dict[str, _Node] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)  # the paths that it stands for
    kind: str = ""  # the class of the modules, where they are several

    def blocks(self) -> list[int]:
        return self.own + [block for child in self.children.values() for block in child.blocks()]

    @property
    def repeats(self) -> int:
        return max(len(self.modules), 1)


def by_module(peak: Peak, classes: Mapping[str, str], *, outside: str = "outside modules") -> list[PeakPart]:
    """Modules, the most first. `classes` has the class of each module's path, the root's under "".

    What belongs to no module is reported as `outside`, with its line.
    """
    root = _Node(classes.get("", "model"), modules={""})
    alike = _alike(peak.trace, classes)
    others: dict[str, list[int]] = defaultdict(list)
    for block in peak.live:
        origin = peak.trace.origins[block]
        path = module_path(origin, classes)
        if path is None:
            others[_elsewhere(origin, outside)].append(block)
        else:
            _node_at(root, path, alike).own.append(block)
    rows = _opened(peak, root, limit=_ROWS, least=_OPENED_SHARE * peak.size)
    found = [_as_part(peak, node) for node in rows if node.blocks()]
    found += [peak.held(name, blocks) for name, blocks in others.items()]
    return _ranked(found)


def module_path(origin: Origin, classes: Mapping[str, str]) -> str | None:
    """The path of the module that a block belongs to; None where it belongs to none."""
    if origin.kind in STATE:  # their origin names a tensor: the module is what comes before
        return origin.module.rpartition(".")[0] if origin.module else None
    if not origin.module:
        return None
    return origin.module if origin.module in classes else ""  # the root goes by its class


def _elsewhere(origin: Origin, outside: str) -> str:
    if origin.kind == "batch":
        return "batch"
    if origin.kind == "optimizer":
        return "optimizer state"
    if origin.phase == "optimizer":
        return "optimizer step"
    if origin.kind == "workspaces":
        return f"{short_operation(origin.operation)} workspaces"
    line = origin.source.split(" ")[0]
    return f"{outside} ({line})" if line else outside


def _alike(trace: Trace, classes: Mapping[str, str]) -> dict[str, str]:
    """For each path that is one of several alike: the class that they share."""
    weights: Counter[str] = Counter()
    for block, origin in enumerate(trace.origins):
        if origin.kind == "weights":
            path = origin.module.rpartition(".")[0]
            while path:
                weights[path] += trace.sizes[block]
                path = path.rpartition(".")[0]
    siblings: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path, kind in classes.items():
        parent, _, last = path.rpartition(".")
        if last.isdigit():
            siblings[parent, kind].append(path)
    found: dict[str, str] = {}
    for (_, kind), paths in siblings.items():
        middle = sorted(weights[path] for path in paths)[len(paths) // 2]
        near = [path for path in paths if middle / _ALIKE <= weights[path] <= middle * _ALIKE]
        if len(near) > 1:  # a first or last one may be another size: it stays alone
            found.update((path, kind) for path in near)
    return found


def _node_at(root: _Node, path: str, alike: Mapping[str, str]) -> _Node:
    node, so_far = root, ""
    for part in path.split(".") if path else ():
        so_far = f"{so_far}.{part}" if so_far else part
        kind = alike.get(so_far, "")
        key = f"*{kind}" if kind else part
        if key not in node.children:
            shown = "*" if kind else part
            node.children[key] = _Node(shown if node is root else f"{node.name}.{shown}", kind=kind)
        node = node.children[key]
        node.modules.add(so_far)
    return node


def _opened(peak: Peak, top: _Node, *, limit: int, least: float, inside: bool = False) -> list[_Node]:
    """The nodes that say the most: the largest is opened repeatedly; what is its own stays a row."""
    sizes: dict[int, int] = {}

    def size(node: _Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = sum(map(peak.size_of, node.blocks()))
        return sizes[id(node)]

    def opens(node: _Node) -> bool:
        if node.repeats > 1 and not inside:
            return False
        return bool(node.children) and (size(node) >= least or (len(node.children) == 1 and not node.own))

    rows = [top]
    keep: list[_Node] = []  # so that an id is not used again
    while len(rows) < limit:
        largest = max(filter(opens, rows), key=size, default=None)
        if largest is None:
            break
        rows.remove(largest)
        keep.append(largest)
        rows += largest.children.values()
        if largest.own:
            rows.append(_Node(_own_name(peak, largest), own=largest.own, modules=largest.modules))
    return rows


def _own_name(peak: Peak, node: _Node) -> str:
    """What a module does besides its children: by its function, where one line makes most of it."""
    lines: Counter[str] = Counter()
    for block in node.own:
        lines[peak.trace.origins[block].source] += peak.size_of(block)
    line, most = lines.most_common(1)[0]
    function = line.partition(" ")[2]
    telling = function not in ("", "forward", "<lambda>") and most >= 0.6 * sum(lines.values())
    return f"{node.name}: {function}" if telling else f"{node.name} itself"


def _as_part(peak: Peak, node: _Node) -> PeakPart:
    blocks = node.blocks()
    parts: tuple[PeakPart, ...] = ()
    if node.children:
        size = sum(map(peak.size_of, blocks))
        rows = _opened(peak, node, limit=_INSIDE, least=0.25 * size, inside=True)
        inner = [(_shown(row, within=node).removeprefix(node.name).lstrip(".: "), row) for row in rows]
        parts = tuple(_ranked(peak.held(one, row.blocks(), repeats=row.repeats) for one, row in inner))
    return peak.held(_shown(node), blocks, repeats=node.repeats, parts=parts)


def _shown(node: _Node, within: _Node | None = None) -> str:
    """A node's name; alike modules with their number (in one of `within`) and their class."""
    count = node.repeats // (1 if within is None else within.repeats)
    return f"{node.name} ({count} x {node.kind})" if node.kind and count > 1 else node.name


# -- helpers


def _last_begins(trace: Trace) -> int:
    """The event with which the last step begins."""
    return trace.step_ends[-2] if len(trace.step_ends) > 1 else trace.begins


def _grouped(peak: Peak, key: Callable[[Origin], str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for block in peak.live:
        groups[key(peak.trace.origins[block])].append(block)
    return groups


def _ranked(found: Iterable[PeakPart]) -> list[PeakPart]:
    return sorted(found, key=lambda one: -one.size)
