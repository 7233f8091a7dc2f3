"""Both sides of the synchronization of a namespace, in one process."""

from __future__ import annotations

import json

from accel_nb.pool.local.shared_payloads import SharedPayloads
from accel_nb.pool.sync.namespace_snapshot import NamespaceSnapshot
from accel_nb.pool.sync.namespace_sync import NamespaceDelta
from accel_nb.pool.sync.result_transfer import ResultReceiver, ResultSender, ReturnRecord
from accel_nb.pool.sync.shared_object_registry import SharedObjectRegistry
from accel_nb.runtime.process.typed_records import build_record


class Sides:
    """A kernel's namespace and a worker's, and everything between them."""

    def __init__(self) -> None:
        self.kernel: dict = {}
        self.worker: dict = {}
        self.ledger, self.receiver, self.returner = (
            SharedObjectRegistry(),
            ResultReceiver(),
            ResultSender(SharedPayloads()),
        )

    def ship(self, *names: str) -> list[str]:
        """Send names and return those that were really sent."""
        prepared = self.ledger.serialize_changes(names, self.kernel, SharedPayloads())
        self.ledger.record_deleted(prepared.removed_names)
        if prepared.payload is not None:
            self.ledger.record_sent(prepared.sent_paths, self.kernel)
            delivery, errors = NamespaceDelta.unpack(prepared.payload, self.worker)
            assert not errors | delivery.apply(self.worker)
            prepared.payload.close()
        return prepared.sent_paths

    def snapshot(self, *used: str, rebound: tuple[str, ...] = ()) -> NamespaceSnapshot:
        return NamespaceSnapshot.take(self.worker, used, shared=self.ledger.shared_names(self.kernel), rebound=rebound)

    def bring_back(self, before: NamespaceSnapshot, **options) -> dict[str, str]:
        """Return what the worker changed, and give the names that stayed there with the reasons."""
        packed = self.returner.collect(self.worker, before, hidden=lambda name, value: False, **options)
        received = self.receiver.receive(
            build_record(ReturnRecord, json.loads(json.dumps(packed.record.to_body()))), packed.payloads, self.kernel
        )
        self.ledger.record_sent(received.paths, self.kernel, received.checksums)
        self.ledger.record_deleted(received.removed)
        return received.not_returned | received.failed

    def close(self) -> None:
        self.returner.close()
        self.receiver.close()
        self.kernel.clear()
        self.worker.clear()
        self.ledger.forget()
