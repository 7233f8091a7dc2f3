"""The names that a notebook and its workers share: values to send with a cell, and results to apply after it."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

from IPython.core.getipython import get_ipython

from accel_nb.config import Resolved
from accel_nb.errors import PoolError
from accel_nb.notebook.cells.assigned_attributes import find_assigned_attributes
from accel_nb.notebook.cells.call import FunctionCall
from accel_nb.notebook.cells.cell_analysis import CellNames, notebook_code_objects
from accel_nb.notebook.cells.outputs import OUTPUT_NAME, keep_output
from accel_nb.notebook.cells.submodules import find_submodules
from accel_nb.notebook.cells.user_names import UserNames
from accel_nb.notebook.messages import CallRequest, RankAnswer, ReloadMode, RunRequest, to_body
from accel_nb.notebook.session.environment_sync import EnvironmentSync, compiler_flags
from accel_nb.notebook.session.imported_changes import RETURNED_NAME, SENT_NAME, ImportedChanges
from accel_nb.notebook.session.log_handlers import seek_ends
from accel_nb.notebook.session.module_sync import ImportedModuleRecord
from accel_nb.notebook.session.own_modules import SentUserModules
from accel_nb.notebook.session.process_settings import apply_returned
from accel_nb.notebook.session.registered_functions import RegisteredFunctions
from accel_nb.notebook.session.replica_check import find_different_names
from accel_nb.notebook.session.run_state import Cell, PackedCell
from accel_nb.notebook.session.set_order import SetOrder
from accel_nb.notebook.session.text_hashes import describe_hashes
from accel_nb.pool.engine import EngineFacts
from accel_nb.pool.payload import MemoryPayloads, Payloads, close_all
from accel_nb.pool.pool import POLL_S, Pool
from accel_nb.pool.sync.objects.object_kinds import is_module
from accel_nb.pool.sync.paths.function_caches import cached_functions, has_changeable_results
from accel_nb.pool.sync.paths.object_paths import readable_path, referenced_objects, root_name
from accel_nb.pool.sync.paths.replaced_objects import describe_other_uses, replace_references
from accel_nb.pool.sync.reductions.open_files import is_open_for_writing
from accel_nb.pool.sync.references import referred_names
from accel_nb.pool.sync.result_transfer import CHANGES, ResultReceiver
from accel_nb.pool.sync.shared_object_registry import SharedObjectRegistry
from accel_nb.runtime.process.environment import has_fixed_hashes


@dataclass(slots=True)
class NamespaceSession:
    """The record of names that have the same value in a notebook and on its workers. Communicates with no process."""

    namespace: dict[str, Any]
    hidden_names: Collection[str] = ()
    _registry: SharedObjectRegistry = field(default_factory=SharedObjectRegistry)
    _receiver: ResultReceiver = field(default_factory=ResultReceiver)
    _environment: EnvironmentSync = field(default_factory=EnvironmentSync)
    _modules: ImportedModuleRecord = field(default_factory=ImportedModuleRecord)
    _own_modules: SentUserModules = field(default_factory=SentUserModules)
    _imported: ImportedChanges = field(default_factory=ImportedChanges)
    _registered: RegisteredFunctions = field(default_factory=lambda: RegisteredFunctions(knows_present=False))
    _set_order: SetOrder = field(default_factory=lambda: SetOrder(has_same_hashes=has_fixed_hashes()))
    _pool: Pool | None = None
    _unanswered: PackedCell | None = None
    """The cell that was packed last, until the workers have answered it."""
    _has_lost_ranks: bool = False
    _has_failed: bool = False
    """Whether the last cell has ended with an error or an interrupt on some rank, or its end is not known."""
    _has_equal_ranks: bool = True
    """Whether the cell that was packed last does the same on all ranks."""
    _not_returned: dict[str, str] = field(default_factory=dict)
    """By path, why the newest value of a name or of a part of it is only on the workers."""
    references: dict[str, list[str]] = field(default_factory=dict)
    """For names whose values are only on the workers: the names to which their code refers, which cells use too."""

    @property
    def only_on_workers(self) -> dict[str, str]:
        """The values whose newest versions are only on the workers, as code would write them, with the reasons."""
        return {readable_path(path): reason for path, reason in self._not_returned.items()}

    @property
    def user_names(self) -> Mapping[str, Any]:
        """The names that the user has bound in the notebook, with their values, without ``accelerator``."""
        return UserNames(self.namespace, self.hidden_names)

    @property
    def shared_names(self) -> list[str]:
        """The paths of all objects that notebook and workers share; returned values refer to objects by these paths."""
        return self._registry.shared_names(self.namespace)

    def reset(self) -> None:
        """Record that some worker has lost the notebook's values: all of them are sent again."""
        self._has_lost_ranks = True
        self._receiver.close()
        self._registry.forget()
        self._environment.reset()
        self._own_modules.clear()
        self._not_returned = {}
        self.references = {}

    def require_sendable(self, names: Iterable[str]) -> None:
        """Raise ShippingError, with the reason, if a value cannot be sent."""
        SharedObjectRegistry().serialize_changes(names, self.namespace, MemoryPayloads())

    def mark_for_sending(self, names: Collection[str]) -> None:
        """Mark names to be sent again with the next cell that uses them."""
        # An optimizer refers to its model: objects that may refer to the names are sent in the same stream.
        self._registry.forget(self._registry.shared_names())
        self._registry.forget(names)

    def release_unused(self) -> None:
        """Free values that the notebook has deleted or replaced, which a record of what was sent keeps in memory."""
        self._registry.release_unused(self.namespace)

    @contextmanager
    def bind_call(self, call: FunctionCall | None) -> Iterator[None]:
        """Bind a call's function in the namespace while the block runs, so that it can be sent by name."""
        if call is None:
            yield
            return
        self.namespace[call.bound_name] = call.function
        try:
            yield
        finally:
            self.namespace.pop(call.bound_name, None)
            self._registry.record_deleted([call.bound_name])

    def pack_cell(
        self, cell: Cell, names: CellNames, resolved: Resolved, pool: Pool, facts: EngineFacts
    ) -> tuple[PackedCell, list[str]]:
        """Pack the values that a cell needs and the workers lack; return them, and lines about what differs there.

        All workers get the modules that no import finds, those on other machines the user's own modules too. Raise
        ShippingError, with a remedy, for a value that cannot be sent.
        """
        self.record_undelivered()  # an interrupt may have come before its request
        is_same_on_ranks = pool.size > 1 and (names.only_reads_accelerator or not names.is_explicit)
        digest, states = self._capture_random_states(always=cell.call is not None or is_same_on_ranks)
        needed = [*names.needed, *referred_names(names.needed, self.user_names, self.namespace)]
        reloaded = self._find_reloads(pool)
        assigned = find_assigned_attributes(cell.tree) | self._imported.in_modules()
        lines = self._imported.update(self.namespace, assigned)
        self._registry.imported = self._imported.ids()
        imported = [SENT_NAME] if SENT_NAME in self.namespace else []
        prepared = self._registry.serialize_changes(
            [*imported, *needed], self.namespace, pool.payloads, rng=states, optional=names.optional
        )
        payloads = {} if prepared.payload is None else {CHANGES: prepared.payload}
        unreturned = () if resolved.config.bring_back else names.bound
        packed = PackedCell(pool, {}, prepared.sent_paths, prepared.removed_names, unreturned, payloads)
        self._unanswered = packed
        try:
            self._registry.record_deleted(prepared.removed_names)
            self._registry.record_sent(prepared.sent_paths, self.namespace)
            codes = list(notebook_code_objects(self.namespace[name] for name in needed))
            lines += self._describe_differences(cell, resolved, needed, codes, prepared.sent_paths)
            modules, notes = self._own_modules.collect(cell.tree) if facts.nodes else ([], [])
            modules += self._own_modules.collect_loaded_from_specs()
            chosen = resolved.config.ranks or range(pool.size)
            request = replace(
                _request_of(cell, names, resolved),
                used=tuple(dict.fromkeys([*needed, *names.used])),
                assigned=tuple(sorted(item.to_text() for item in assigned)),
                submodules=find_submodules(cell.tree, self.namespace),
                shared=tuple(self.shared_names),
                contained=tuple(self._contained_names(names.bound)),
                sources=self._environment.new_sources(codes),
                rng_digest=digest,
                variables=self._environment.changed_variables(facts.variables),
                settings=self._environment.changed_settings(),
                modules=tuple(modules),
                reloaded=reloaded,
                lines=tuple(self._modules.describe_reloads(reloaded)),
                is_on_some_ranks=len(chosen) < pool.size,
                first_rank=min(chosen),
                has_lost_ranks=self._has_lost_ranks,
                follows_failure=self._has_failed,
            )
            has_equal_ranks = request.is_plain and not (request.may_depend_on_rank or request.is_on_some_ranks)
            self._has_equal_ranks = has_equal_ranks or pool.size == 1
            lines += self._registered.describe_new(is_worker=False)
            lines += [*notes, *(f"left out: {problem}" for problem in prepared.left_out.values())]
            poll_s = POLL_S if cell.call is None else min(POLL_S, cell.call.poll_s)
            return replace(packed, bodies=_bodies_of(request, payloads, chosen, pool.size), poll_s=poll_s), lines
        except BaseException:  # a class of the user may raise anything, and an interrupt may arrive
            close_all(payloads.values())
            raise

    def _find_reloads(self, pool: Pool) -> dict[str, ReloadMode]:
        """Return the modules that the workers of a pool must reload, and how."""
        if pool is not self._pool:
            self._pool = pool
            self._modules.clear()
            self._own_modules.clear()
        reloaded = self._modules.modules_to_reload()
        if reloaded:  # the workers' objects are instances of classes of the old modules
            self._registry.forget(self._registry.shared_names())
        return reloaded

    def _describe_differences(
        self, cell: Cell, resolved: Resolved, needed: list[str], codes: list[CodeType], sent_paths: list[str]
    ) -> list[str]:
        """Return lines about values that are not the same on the workers: sets, caches, open files, hashes."""
        self._set_order.record_sent(dict.fromkeys(map(root_name, sent_paths)), self.namespace)
        lines = self._set_order.describe(cell.tree, needed)
        lines += _describe_caches(sent_paths, self.namespace)
        lines += [] if resolved.config.bring_back else _describe_files(needed, self.namespace)
        if "hash" not in self.namespace and not has_fixed_hashes():
            lines += describe_hashes(cell.tree, codes)
        return lines

    def _contained_names(self, bound: Collection[str]) -> list[str]:
        """Return names that a cell binds whose values are also in the values of names that it does not bind."""
        used = self._registry.used_elsewhere(bound, self.namespace)
        if not used:
            return []
        # Threads of the notebook may bind and delete names meanwhile.
        others = {name: self.namespace.get(name) for name in self.user_names if name not in bound}
        parts = (part for name, value in others.items() for part in (value, *referenced_objects(name, value).values()))
        contained = set(map(id, parts))
        return [name for name in used if id(self.namespace[name]) in contained]

    def record_answers(self, packed: PackedCell, answers: Collection[RankAnswer]) -> None:
        """Record that the workers have answered a packed cell."""
        self._has_lost_ranks = False
        self._has_failed = any(answer.outcome != "done" for answer in answers)
        seek_ends()
        self._modules.record(answer.reply.modules for answer in answers)
        if not all(answer.reply.has_run for answer in answers):
            self.record_undelivered()  # the values could not be unpacked
        self._unanswered = None
        for name in packed.unreturned_names:
            self._registry.record_worker_only(name, self.namespace)

    def record_undelivered(self) -> None:
        """Record that the last packed cell may not have arrived, if it has no answers: its values are sent again."""
        packed, self._unanswered = self._unanswered, None
        if packed is not None:
            self._has_failed = True
            self._registry.forget(map(root_name, packed.sent_paths))
            self._registry.record_outdated(packed.removed_names)
            self._environment.reset()
            self._own_modules.clear()

    def apply_answers(self, answers: Collection[RankAnswer], changed_names: set[str] | None = None) -> list[str]:
        """Apply the values and settings that rank 0 returned; return lines about values that were replaced or not sent.

        Names whose values changed are added to ``changed_names``.
        """
        lines: list[str] = []
        does_the_same, returned_names = self._has_equal_ranks, set[str]()
        for answer in answers:
            lines += apply_returned(answer.reply.settings)
            self._environment.record_returned(answer.reply.settings)
            returned = answer.reply.returned
            if returned is None:
                close_all(answer.payloads.values())
                continue
            received = self._receiver.receive(returned, answer.payloads, self.namespace, self._registry.shared_ids)
            names = received.paths
            read = {path for path in received.not_returned if self._registry.record_read(path, self.namespace)}
            self._set_order.record_returned(names)
            self._registry.record_sent(names, self.namespace, received.checksums)
            self._registry.record_deleted(received.removed)
            if self.namespace.pop(RETURNED_NAME, None) is not None:
                self._registry.record_deleted([RETURNED_NAME])
            if keep_output(self.namespace, is_of_this_cell=changed_names is None):
                self._registry.record_deleted([OUTPUT_NAME])
            arrived = {root_name(name) for name in (*names, *received.removed)}
            returned_names |= arrived
            if changed_names is not None:
                changed_names |= arrived
            has_earlier = any(
                _name_of(path) in arrived for path in self._not_returned
            )  # since an earlier cell, of any kind
            self._has_equal_ranks = self._has_equal_ranks and not has_earlier
            self._not_returned = {
                path: why for path, why in self._not_returned.items() if _name_of(path) not in arrived
            }
            self.references = {name: names for name, names in self.references.items() if name not in arrived}
            self.references |= answer.reply.references
            reasons: dict[str, str] = {}
            for name, reason in (received.not_returned | received.failed).items():
                if name not in names and name not in read and name.isidentifier():
                    self._registry.record_worker_only(name, self.namespace)
                if reason:
                    reasons[name] = reason
            self._not_returned |= reasons
            if reasons:
                listed = ", ".join(f"{readable_path(path)} ({reason})" for path, reason in reasons.items())
                fetch = dict.fromkeys(_name_of(path) for path, reason in reasons.items() if reason.endswith("large"))
                hint = f" · `%accelerate pull {' '.join(fetch)}` fetches" if fetch else ""
                lines.append(f"stayed on the workers: {listed}{hint}")
            lines += [
                f"{name} is a new object, since the cell changed its layers; other variables that refer "
                "to it still have the earlier model"
                for name, old in received.replaced.items()
                if is_module(old)
            ]
            others = {name: old for name, old in received.replaced.items() if not is_module(old)}
            received.replaced.clear()
            outdated = self._replace_references(others) if others else {}
            lines += outdated.values()
            lines += [] if received.items is None else received.items.describe_other_uses(outdated)
        self._registry.record_different(find_different_names(list(answers)))
        is_complete = all(answer.is_complete for answer in answers)
        if does_the_same and not is_complete and len(answers) > 1:
            self._registry.record_unequal(returned_names)
        if not self._has_equal_ranks or not is_complete:
            self._registry.record_rank_dependent()
        return lines

    def _replace_references(self, old: dict[str, Any]) -> dict[str, str]:
        """Replace references to ``old`` objects by the present values of their names, and empty ``old``.

        Return by name a line for each old object that is still referred to elsewhere.
        """
        rebound = replace_references(old, self.user_names, self.namespace)
        outdated = [name for name in self._registry.shared_names() if name in rebound]
        self._registry.forget(outdated)
        self._registry.record_outdated(outdated)
        return describe_other_uses(old)

    def _capture_random_states(self, *, always: bool) -> tuple[str | None, Any]:
        """Return the digest of the kernel's generator states, and the states if rank 0's differ or if ``always``."""
        if "torch" not in sys.modules:
            return None, None
        from accel_nb.runtime import rng

        states = rng.capture_cpu()
        digest = rng.digest(states)
        return digest, None if digest == self._receiver.rng and not always else states


def _describe_caches(paths: Iterable[str], namespace: Mapping[str, Any]) -> list[str]:
    """Return a line about functions that are sent without results that code can change."""
    names = dict.fromkeys(path for path in paths if path == root_name(path))
    found = [item for name in names for item in cached_functions(name, namespace.get(name))]
    labels = [label for label, function in found if has_changeable_results(function)]
    return [f"the workers compute again what the notebook has in the cache of {', '.join(labels)}"] if labels else []


def _describe_files(names: Iterable[str], namespace: Mapping[str, Any]) -> list[str]:
    """Return a line about files open for writing in a cell that returns nothing, not even the files' places."""
    found: dict[str, Any] = {}
    for name in names:
        found |= {name: namespace[name], **referenced_objects(name, namespace[name])}
    labels = [readable_path(path) for path, item in found.items() if is_open_for_writing(item)]
    if not labels:
        return []
    return [
        f"with --no-return the notebook's {', '.join(labels)} stays at its place in the file: what it writes after the "
        "cell overwrites what the workers write. Open the file again with mode 'a' after the cell"
    ]


def _bodies_of(
    request: RunRequest, payloads: Payloads, chosen: Collection[int], size: int
) -> dict[int, dict[str, Any]]:
    """Return the request by rank.

    If it has values, modules or settings, ranks that do not run the cell receive it too: afterwards all have the same.
    """
    body, idle_body = to_body(request), to_body(replace(request, is_idle=True))
    ranks = range(size) if payloads or request.modules or request.reloaded or request.settings else chosen
    return {rank: body if rank in chosen else idle_body for rank in ranks}


def _current_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise PoolError("the notebook's folder was deleted: change to another one by %cd, as in `%cd ~`") from None


def _request_of(cell: Cell, names: CellNames, resolved: Resolved) -> RunRequest:
    """Return the request to run a cell, without the values and changes that a session keeps."""
    is_call = cell.call is not None
    return RunRequest(
        source=cell.source,
        config=resolved.to_json(),
        cwd=_current_folder(),
        sys_path=tuple(entry for entry in sys.path if isinstance(entry, str)),
        shell_name="" if (shell := get_ipython()) is None else type(shell).__name__,
        compiler_flags=compiler_flags(cell.tree) | cell.flags,
        execution_count=cell.execution_count,
        bound=tuple(names.bound),
        is_plain=not names.is_explicit and not is_call,
        only_reads_accelerator=names.only_reads_accelerator and not is_call,
        uses_accelerator=names.uses_accelerator,
        may_depend_on_rank=names.may_depend_on_rank,
        is_empty=names.is_empty,
        call=None if cell.call is None else CallRequest(cell.call.bound_name, dict(cell.call.variables)),
        entropy=secrets.randbits(62),
    )


def _name_of(path: str) -> str:
    """Return the name at the start of a path, which may end with an attribute: ``trainer.log``."""
    return root_name(path).partition(".")[0]
