"""Who sends to whom, as an SVG: trainer ranks on the left, engine ranks on the right, a line per pair as wide as its bytes."""

from __future__ import annotations

from html import escape

import numpy as np

from megatron_rl.resharding.plan import ReshardPlan

MAX_RANKS = 64
"""Of either side; a larger picture is black."""
_ROW, _TOP, _LEFT, _RIGHT, _WIDTH = 22, 64, 210, 630, 860
_COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#8338ec", "#bc6c25", "#0a9396", "#9b2226", "#5f6caf")


def draw_plan(plan: ReshardPlan, title: str, *, bytes_per_element: int = 2) -> str:
    """The SVG text. Raises ValueError, one line, for layouts of more than `MAX_RANKS` ranks on a side."""
    elements = plan.num_elements_between()
    num_trainers, num_engine_ranks = elements.shape
    if max(num_trainers, num_engine_ranks) > MAX_RANKS:
        raise ValueError(f"--svg draws at most {MAX_RANKS} ranks a side, this layout has {num_trainers} and {num_engine_ranks}")
    height = _TOP + _ROW * max(num_trainers, num_engine_ranks) + 20
    sent, received = elements.sum(axis=1) * bytes_per_element, elements.sum(axis=0) * bytes_per_element
    received += np.roll(plan.num_relayed(), plan.engine_layout.tp) * bytes_per_element
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="16" y="24" font-size="15">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="48" text-anchor="end">trainer ranks</text><text x="{_RIGHT}" y="48">engine ranks</text>',
    ]
    largest = max(int(elements.max()), 1)
    for source, target in zip(*elements.nonzero(), strict=True):
        width = 0.4 + 4.6 * elements[source, target] / largest
        colour = _COLOURS[_stage(plan, int(source)) % len(_COLOURS)]
        a, b = _y(int(source), num_trainers, height), _y(int(target), num_engine_ranks, height)
        middle = (_LEFT + _RIGHT) // 2
        size = _size(int(elements[source, target]) * bytes_per_element)
        lines.append(
            f'<path d="M{_LEFT + 8},{a} C{middle},{a} {middle},{b} {_RIGHT - 8},{b}" fill="none" stroke="{colour}" '
            f'stroke-width="{width:.2f}" stroke-opacity="0.55"><title>{source} to {target}: {size}</title></path>'
        )
    lines += _relays(plan, num_engine_ranks, height)
    for rank in range(num_trainers):
        text = f"stage {_stage(plan, rank)}, rank {rank}: {_size(int(sent[rank]))}"
        lines.append(_label(_LEFT, _y(rank, num_trainers, height), text, anchor="end"))
    for rank in range(num_engine_ranks):
        engine, inside = divmod(rank, plan.engine_layout.tp)
        text = f"engine {engine}, rank {inside}: {_size(int(received[rank]))}"
        lines.append(_label(_RIGHT, _y(rank, num_engine_ranks, height), text, anchor="start"))
    return "\n".join([*lines, "</svg>", ""])


def _relays(plan: ReshardPlan, num_engine_ranks: int, height: int) -> list[str]:
    """An arc from every engine rank to the neighbour it passes boxes on to."""
    arcs = []
    for rank, amount in enumerate(plan.num_relayed().tolist()):
        if amount:
            a = _y(rank, num_engine_ranks, height)
            b = _y((rank + plan.engine_layout.tp) % num_engine_ranks, num_engine_ranks, height)
            arcs.append(f'<path d="M{_RIGHT - 8},{a} C560,{a} 560,{b} {_RIGHT - 8},{b}" fill="none" stroke="#444"/>')
    return arcs


def _stage(plan: ReshardPlan, rank: int) -> int:
    return rank // (plan.layout.world_size // plan.layout.pp)


def _y(rank: int, num_ranks: int, height: int) -> int:
    """Both sides fill the height evenly."""
    return round(_TOP + (rank + 0.5) * (height - _TOP - 20) / num_ranks)


def _label(x: int, y: int, text: str, *, anchor: str) -> str:
    dot = x + (8 if anchor == "end" else -8)
    return f'<circle cx="{dot}" cy="{y}" r="3"/><text x="{x}" y="{y + 4}" text-anchor="{anchor}">{text}</text>'


def _size(num_bytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes} B"
