"""What a compiled program does beside arithmetic, read off its HLO text.

Collectives are what chips tell each other, custom calls what XLA's cost analysis may
not count. An operation inside a loop is listed once, however often it runs.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Collective", "collectives", "custom_calls", "shape_bytes"]

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

_HEADER = re.compile(r"(?:ENTRY )?%?([\w.-]+) .*\{$|(?:ENTRY )?%?([\w.-]+) \{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?[\w.-]+ = (.*)")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|true_computation|"
    r"false_computation|called_computations)=(\{[^}]*\}|%?[\w.-]+)"
)
_SHAPE = re.compile(r"\b(pred|token|[a-z]+\d+\w*)\[([\d,<=]*)\]")


class Collective(NamedTuple):
    """One collective operation.

    Attributes:
      kind: of `KINDS`.
      bytes: of its results on one chip, without padding.
      in_loop: whether a loop runs it.
    """

    kind: str
    bytes: int
    in_loop: bool


class _Instruction(NamedTuple):
    computation: str
    shape: str
    opcode: str
    rest: str  # operands and attributes


def collectives(text: str) -> list[Collective]:
    """The collectives of a program, in the text's order.

    Args:
      text: `compiled.as_text()`. One that runs beside other work is its `-start`; one
        inside a fusion, or wrapped into a computation of its own, counts too.
    """
    instructions = list(_instructions(text))
    looped = _in_loops(instructions)
    found = []
    for at in instructions:
        kind = at.opcode.removesuffix("-start")
        wraps = kind != at.opcode and "calls=" in at.rest  # counted where it lies
        if kind in KINDS and not wraps:
            size = shape_bytes(_result(at))
            found.append(Collective(kind, size, at.computation in looped))
    return found


def custom_calls(text: str) -> dict[str, int]:
    """How many custom calls of each target a program has, by name."""
    targets = Counter(
        re.search(r'custom_call_target="([^"]*)"', at.rest)[1]
        for at in _instructions(text)
        if at.opcode == "custom-call"
    )
    return dict(sorted(targets.items()))


def shape_bytes(shape: str) -> int:
    """Bytes of a shape as HLO writes it, tuples included: `(f32[2,3]{1,0}, pred[])`."""
    total = 0
    for kind, sizes in _SHAPE.findall(shape):
        bits = re.search(r"\d+", kind)
        each = 8 if kind == "pred" else int(bits[0]) if bits else 0
        values = math.prod(int(s.lstrip("<=")) for s in sizes.split(",") if s)
        total += math.ceil(values * each / 8)
    return total


def _instructions(text: str) -> Iterator[_Instruction]:
    computation = ""
    for line in text.splitlines():
        if header := _HEADER.fullmatch(line):
            computation = header[1] or header[2]
        elif found := _INSTRUCTION.fullmatch(line):
            shape, rest = _cut_shape(found[1])
            opcode, _, rest = rest.partition("(")
            yield _Instruction(computation, shape, opcode, rest)


def _cut_shape(text: str) -> tuple[str, str]:
    """A shape, which is a tuple in brackets or has no blank, and what follows it."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    end = _closing(text, 0) + 1
    return text[:end], text[end:].lstrip()


def _closing(text: str, start: int) -> int:
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    return len(text) - 1


def _result(at: _Instruction) -> str:
    """The shape of a collective's result; most `-start`s carry operands beside it."""
    carries = at.opcode.endswith("-start") and at.opcode != "all-reduce-start"
    if not carries or not at.shape.startswith("("):
        return at.shape
    _, rest = _cut_element(at.shape[1:-1])
    return _cut_element(rest)[0]


def _cut_element(text: str) -> tuple[str, str]:
    """The first element of a tuple's inside, and the others."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            return text[:place], text[place + 1 :].lstrip()
    return text, ""


def _in_loops(instructions: list[_Instruction]) -> set[str]:
    """The computations that a loop runs, at any depth."""
    calls: dict[str, set[str]] = {}
    waiting = set()
    for at in instructions:
        for _, names in _CALLED.findall(at.rest):
            called = set(re.findall(r"[\w.-]+", names))
            calls.setdefault(at.computation, set()).update(called)
            if at.opcode == "while":
                waiting |= called
    looped: set[str] = set()
    while waiting:
        looped |= waiting
        waiting = set().union(*(calls.get(name, ()) for name in waiting)) - looped
    return looped
