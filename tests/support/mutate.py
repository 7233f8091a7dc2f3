"""Random changes of bytes and of JSON values; the same seed makes the same changes."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

NUM_ROUNDS = int(os.environ.get("FUZZ", "150"))
"""How many changes each test makes of each of its samples."""

HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 10**400, 0.5, 1e308, float("inf"), float("nan"), "",
    "..", "/etc/passwd", "../../x", "a\0b", "\ud800", "x" * 5000, "<img src=x onerror=alert(1)>", "__proto__",
    "constructor", "\x1b[2J", "1e999", [], {}, [[]], [0] * 100, {"": None}, {"kind": []},
)  # fmt: skip


def rounds(seed: int, num_rounds: int = NUM_ROUNDS) -> Iterator[random.Random]:
    """Yield one generator for each round, seeded by ``seed`` and the round's number: each round can be repeated."""
    for index in range(num_rounds):
        yield random.Random(f"{seed}/{index}")


def changed_bytes(content: bytes, chance: random.Random) -> bytes:
    """Return bytes with some flipped, removed, inserted or repeated, or with the end removed."""
    data = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        length = min(chance.choice((1, 1, 2, 8, 64)), len(data) - at)
        kind = chance.randrange(5)
        if kind == 0 and length:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del data[at : at + length]
        elif kind == 2:
            data[at:at] = chance.choice(
                (b"\0", b"\xff" * 8, b"[" * 200, b"{", b'"', b"\\", b"9" * 30, b"NaN", b"\xed\xa0")
            )
        elif kind == 3:
            data[at:at] = data[at : at + length] * chance.choice((1, 2, 50))
        elif kind == 4:
            del data[at:]
    return bytes(data)


def changed_value(value: Any, chance: random.Random) -> Any:
    """Return a JSON value in which one item, at any depth, is replaced, removed or repeated."""
    inside = isinstance(value, dict | list) and value and chance.random() < 0.85
    if not inside:
        return chance.choice(HOSTILE)
    made = dict(value) if isinstance(value, dict) else list(value)
    key = chance.choice(list(made)) if isinstance(made, dict) else chance.randrange(len(made))
    kind = chance.randrange(8)
    if kind == 0:
        del made[key]  # pyright: ignore[reportArgumentType, reportCallIssue]
    elif kind == 1 and isinstance(made, dict):
        made[str(chance.choice(HOSTILE))] = made[key]
    elif kind == 1:
        made.append(made[key])
    else:
        made[key] = changed_value(made[key], chance)
    return made
