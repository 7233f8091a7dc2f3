"""What a notebook and its workers both hold: what they lack goes out with a cell, what they made comes back."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from accel_nb.config import Resolved
from accel_nb.notebook.cells.call import Call
from accel_nb.notebook.cells.cell_analysis import CellNames, notebook_codes
from accel_nb.notebook.cells.user_names import UserNames
from accel_nb.notebook.session.environment_sync import Surroundings, compiler_flags
from accel_nb.notebook.session.module_sync import ImportedModules
from accel_nb.notebook.session.run_state import Cell, Shipment
from accel_nb.pool.control.stop_escalation import Answer
from accel_nb.pool.payload import MemoryPayloads, close_all
from accel_nb.pool.pool import POLL_S, Pool
from accel_nb.pool.sync.namespace_sync import Ledger, referred_names
from accel_nb.pool.sync.object_paths import root_of
from accel_nb.pool.sync.result_transfer import CHANGES, Receiver


@dataclass(slots=True)
class Exchange:
    """Knows which names of a notebook its workers hold as the notebook does; starts and asks no process itself."""

    namespace: dict[str, Any]
    hidden_names: Collection[str] = ()
    kept: dict[str, str] = field(default_factory=dict)
    """Names whose newest values stayed on the workers, with the reason."""
    _ledger: Ledger = field(default_factory=Ledger)
    _receiver: Receiver = field(default_factory=Receiver)
    _surroundings: Surroundings = field(default_factory=Surroundings)
    _modules: ImportedModules = field(default_factory=ImportedModules)
    _pool: Pool | None = None
    _has_lost_ranks: bool = False

    @property
    def user_names(self) -> Mapping[str, Any]:
        """The notebook's names that are its user's, with their values."""
        return UserNames(self.namespace, self.hidden_names)

    @property
    def shared_names(self) -> list[str]:
        """The paths of all that both sides hold, by which what comes back finds its place."""
        return self._ledger.names(self.namespace)

    def forget(self) -> None:
        """Note that some worker holds nothing of the notebook any more."""
        self._has_lost_ranks = True
        self._receiver.close()
        self._ledger.forget()
        self._surroundings.forget()
        self.kept = {}

    def require_sendable(self, names: Iterable[str]) -> None:
        """Raise ShippingError, with the reason, for names whose values cannot be sent."""
        Ledger().prepare(names, self.namespace, MemoryPayloads())

    def send_anew(self, names: Collection[str]) -> None:
        """Send names with the next cell that uses them, whatever the workers hold."""
        # An optimizer refers to its model: what may refer to the names goes along, in one stream.
        self._ledger.forget(self._ledger.names())
        self._ledger.forget(names)

    @contextmanager
    def binding(self, call: Call | None) -> Iterator[None]:
        """Give a call the name by which it is sent, for as long as the block runs."""
        if call is None:
            yield
            return
        self.namespace[call.bound_to] = call.function
        try:
            yield
        finally:
            self.namespace.pop(call.bound_to, None)
            self._ledger.drop([call.bound_to])

    def pack(
        self, cell: Cell, names: CellNames, resolved: Resolved, pool: Pool, started_with: Mapping[str, str]
    ) -> tuple[Shipment, list[str]]:
        """Pack what a cell needs and the workers lack, and return it with lines about what was left out.

        ``started_with`` are the environment variables that the workers started with. Raises ShippingError, with the
        way out, for what cannot be sent.
        """
        digest, states = self._random_states(or_not=cell.call is not None)
        needed = [*names.needed, *referred_names(names.needed, self.user_names, self.namespace)]
        if pool is not self._pool:
            self._pool = pool
            self._modules.forget()
        reloaded = self._modules.changed()
        if reloaded:
            self._ledger.forget(self._ledger.names())  # what the workers hold was made by the modules as they were
        prepared = self._ledger.prepare(needed, self.namespace, pool.payloads, rng=states, optional=names.spare)
        payloads = {} if prepared.payload is None else {CHANGES: prepared.payload}
        settings = self._surroundings.settings()
        chosen = resolved.config.ranks or range(pool.size)
        body = {
            "source": cell.source,
            "compiler_flags": compiler_flags(cell.tree),
            "execution_count": cell.execution_count,
            "used": list(dict.fromkeys([*needed, *names.used])),
            "bound": list(names.bound),
            "is_plain": not names.is_explicit and cell.call is None,
            "observes": names.observes and cell.call is None,
            "call": None if cell.call is None else cell.call.to_body(),
            "wants_accelerator": names.wants_accelerator,
            "tells_ranks_apart": names.tells_ranks_apart,
            "sources": self._surroundings.sources(notebook_codes(self.namespace[name] for name in needed)),
            "is_empty": names.is_empty,
            "config": resolved.to_json(),
            "cwd": os.getcwd(),
            "rng": digest,
            "has_rng": states is not None,
            "sys_path": [entry for entry in sys.path if isinstance(entry, str)],
            "variables": self._surroundings.variables(started_with),
            "settings": settings,
            "reloaded": reloaded,
            "lines": self._modules.describe(reloaded),
            "default_dtype": _default_dtype(),
            "is_partial": len(chosen) < pool.size,
            "has_lost_ranks": self._has_lost_ranks,
        }
        self._ledger.record(prepared.sent, self.namespace)  # nothing fails from here on: what is recorded is sent
        body["shared"] = self.shared_names
        # Every rank takes what is sent, also where the cell runs on some only: they all hold the same afterwards.
        ranks = range(pool.size) if payloads or reloaded or settings else chosen
        bodies = {rank: {**body, "is_idle": rank not in chosen} for rank in ranks}
        poll_s = POLL_S if cell.call is None else min(POLL_S, cell.call.poll_s)
        lines = [f"left out: {problem}" for problem in prepared.left_out.values()]
        unreturned = () if resolved.config.bring_back else names.bound
        return Shipment(pool, bodies, prepared.sent, prepared.removed, unreturned, payloads, poll_s), lines

    def note_delivered(self, shipment: Shipment, answers: Collection[Answer]) -> None:
        """Hear that the workers have answered a shipment."""
        self._has_lost_ranks = False
        self._modules.note(answer.body["modules"] for answer in answers if "modules" in answer.body)
        if any(answer.outcome == "raised" and "returned" not in answer.body for answer in answers):
            self.note_lost(shipment)  # the delivery itself failed
        for name in shipment.unreturned:
            self._ledger.record_only_there(name, self.namespace)

    def note_lost(self, shipment: Shipment) -> None:
        """Hear that nobody knows what has become of a shipment."""
        self._ledger.forget(map(root_of, shipment.sent))
        self._ledger.supersede(shipment.removed)
        self._surroundings.forget()

    def take_in(self, answers: Iterable[Answer], came: set[str] | None = None) -> list[str]:
        """Apply what rank 0 sent back; returns a line about what stayed on the workers, if anything did.

        ``came`` gets the names that hold something else now.
        """
        lines: list[str] = []
        for answer in answers:
            returned = answer.body.get("returned")
            if returned is None:
                close_all(answer.payloads.values())
                continue
            received = self._receiver.receive(returned, answer.payloads, self.namespace)
            names = received.paths
            self._ledger.record(names, self.namespace)
            self._ledger.drop(received.removed)
            arrived = {root_of(name) for name in (*names, *received.removed)}
            if came is not None:
                came |= arrived
            self.kept = {name: why for name, why in self.kept.items() if name.partition(".")[0] not in arrived}
            told: dict[str, str] = {}
            for name, reason in (received.kept | received.failed).items():
                if name not in names and name.isidentifier():
                    self._ledger.record_only_there(name, self.namespace)
                if reason:
                    told[name] = reason
            self.kept |= told
            if told:
                listed = ", ".join(f"{name} ({reason})" for name, reason in told.items())
                fetch = [name for name, reason in told.items() if reason.endswith("large")]
                hint = f" · `%accelerate pull {' '.join(fetch)}` fetches" if fetch else ""
                lines.append(f"stayed on the workers: {listed}{hint}")
        return lines

    def _random_states(self, *, or_not: bool) -> tuple[str | None, Any]:
        """Return the digest of the kernel's generator states, and the states if rank 0's were others, ``or_not``."""
        if "torch" not in sys.modules:
            return None, None
        from accel_nb.runtime.process import rng

        states = rng.present()
        digest = rng.digest(states)
        return digest, None if digest == self._receiver.rng and not or_not else states


def _default_dtype() -> str | None:
    """Return the name of torch's default dtype, if the kernel has torch."""
    torch = sys.modules.get("torch")
    return None if torch is None else str(torch.get_default_dtype()).removeprefix("torch.")
