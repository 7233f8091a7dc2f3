"""The worker's program: runs notebook cells and calls, and prepares plain cells. Never imported by the kernel."""

from __future__ import annotations

import ast
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.memory import memory_snapshot, post_mortem
from accel_nb.accelerator.plain_cells.cell_warnings import warn_if_unprepared
from accel_nb.accelerator.plain_cells.error_hints import explain_error
from accel_nb.accelerator.plain_cells.unreachable_objects import release_unreachable
from accel_nb.accelerator.process.memory_release import is_out_of_memory
from accel_nb.accelerator.training.run_control import (
    NO_MEMORY_SNAPSHOT,
    ControlReceiver,
    TrainingStopped,
    current_control_receiver,
    describe_value,
)
from accel_nb.config import Resolved, resolve, using_layers
from accel_nb.errors import AccelNbError, ShippingError, UnknownNameError, error_text
from accel_nb.notebook.cells.call import RESULT, pack_result
from accel_nb.notebook.cells.cell_analysis import names_in_code
from accel_nb.notebook.cells.future_imports import FUTURE_FLAGS
from accel_nb.notebook.cells.outputs import OUTPUT_NAME, bind_output
from accel_nb.notebook.cells.user_names import ACCELERATOR_NAME, is_reserved
from accel_nb.notebook.messages import CallRequest, PullRequest, ReloadMode, RunRequest, TaskReply, to_body
from accel_nb.notebook.session.imported_changes import SENT_NAME
from accel_nb.notebook.session.log_handlers import send_records
from accel_nb.notebook.session.module_sync import WorkerModules
from accel_nb.notebook.session.process_settings import (
    ChangedSettings,
    apply_settings,
    kept_log_levels,
    limit_error_filters,
)
from accel_nb.notebook.worker.cell_accelerators import CellAccelerators
from accel_nb.notebook.worker.cell_worker import CellWorker, ZygoteWorker
from accel_nb.notebook.worker.error_reports import describe_exit, format_traceback, make_error_report
from accel_nb.notebook.worker.imported_returns import ImportedReturns
from accel_nb.notebook.worker.prepare_calls import PrepareInserter, bound_prepare_function
from accel_nb.notebook.worker.rank_values import digest_values
from accel_nb.notebook.worker.sent_modules import SentModules
from accel_nb.notebook.worker.shell import (
    get_worker_shell,
)
from accel_nb.pool.messages import Outcome
from accel_nb.pool.payload import BufferPayload, Payload, Payloads, find_payload
from accel_nb.pool.program import TaskResult
from accel_nb.pool.sync.namespace_snapshot import NamespaceSnapshot
from accel_nb.pool.sync.namespace_sync import NamespaceDelta, describe_failures
from accel_nb.pool.sync.objects.shared_ids import SharedObjects
from accel_nb.pool.sync.paths.object_paths import root_name
from accel_nb.pool.sync.reductions.event_writers import close_event_writers
from accel_nb.pool.sync.result_transfer import CHANGES, PackedReturn, ResultSender, ReturnRecord
from accel_nb.runtime import rng
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.process.environment import patch_environment, set_variables
from accel_nb.runtime.process.typed_records import build_record
from accel_nb.telemetry.actions import read_action
from accel_nb.telemetry.events import current_sink
from accel_nb.telemetry.out_of_memory import OutOfMemoryReport

_Error = TypeVar("_Error", bound=BaseException)


class CellProgram:
    """Runs cells on one rank and collects the values to return."""

    def __init__(self, worker: CellWorker) -> None:
        self._worker = worker
        self._shell = get_worker_shell(self._send_display)
        self._namespace: dict[str, Any] = self._shell.user_ns
        self._shell_names = frozenset(self._namespace)
        self._result_sender = ResultSender(worker.payloads)
        self._control_receiver = ControlReceiver(
            worker.report_action_done,
            self._describe_name,
            self._report_memory_snapshot,
            lambda: worker.report_interrupt(is_raised=True),
        )
        self._accelerators = CellAccelerators(worker, self._namespace)
        self._options: tuple[str, Resolved] | None = None
        self._variables: dict[str, str | None] = {}
        # Read before a cell, and again only if the cell or a request has changed any.
        self._settings: ChangedSettings | None = None
        # The notebook's folder, import path and variables that were applied last.
        self._environment: tuple[str, tuple[str, ...], dict[str, str | None]] | None = None
        self._sent_modules = SentModules()
        self._modules = WorkerModules(self._sent_modules)
        # Lines to show below the running cell, and the return value of the running call.
        self._lines: list[str] = []
        self._result: Any = None

    def handle(self, task: str, body: dict[str, Any], payloads: Payloads) -> TaskResult:
        """Execute one task: ``run`` a cell or a call, or ``pull`` names."""
        if task == "run":
            request = build_record(RunRequest, body)
            try:
                return self._run(request, payloads)
            finally:
                if request.call is not None:
                    self._namespace.pop(request.call.bound_name, None)
        if task == "pull":
            return self._pull(build_record(PullRequest, body))
        raise ValueError(f"a worker has no task {task!r}")

    def describe_error(self, error: BaseException) -> dict[str, Any]:
        """Return type, message and traceback of an error, and the pickled error."""
        return TaskReply(
            has_run=False,
            error=make_error_report(error, format_traceback(error, self._shell.InteractiveTB), self._namespace),
        ).to_body()

    def on_group_reopened(self) -> None:
        """Close the accelerators of the old process group; the next cell prepares its objects again."""
        self._accelerators.suspend()

    def finish_step(self) -> bool:
        """Make the cell save and end after its next step; return False if it does not save or no step ends soon."""
        # A list, since `any` of a generator would not call all of them.
        accepted = [accelerator.request_stop() for accelerator in self._accelerators.open_accelerators()]
        return any(accepted)

    def propose_action(self, action_id: int, action: dict[str, Any]) -> int | None:
        """Propose an action for the end of a step; return the number of steps that this rank has reached."""
        return self._control_receiver.propose(action_id, read_action(action))

    def decide_action(self, action_id: int, count: int | None) -> None:
        """Execute the proposed action at the end of step ``count``, or drop it if ``count`` is None."""
        self._control_receiver.decide(action_id, count)

    def _run(self, request: RunRequest, payloads: Payloads) -> TaskResult:
        with self._shell.as_notebook(request.shell_name):
            self._apply_request(request, payloads)
        if request.is_idle:
            return TaskResult("done", TaskReply(was_idle=True, modules=self._modules.new_imports()).to_body())
        resolved = self._read_options(request.config)
        returns = self._worker.world.is_main and resolved.config.bring_back
        imported = ImportedReturns(request.assigned if returns else (), self._namespace)
        before = self._take_snapshot(request, imported.ids()) if returns else None
        settings = (self._settings or ChangedSettings()) if returns and request.call is None else None
        error = self._execute_and_finish(request, resolved)
        outcome, reply = self._make_reply(request, error)
        interrupted_exchange = outcome == "raised" and any(
            accelerator.has_interrupted_backward for accelerator in self._accelerators.open_accelerators()
        )
        self._lines += imported.bind_changed(request.bound)
        if outcome == "done":
            absent = [name for name in resolved.config.pull if name not in self._namespace]
            self._lines += [f"--pull {name}: after the cell there is no such name" for name in absent]
        if before is not None:
            before.imported = imported.ids()
        changed, notes = ({}, []) if settings is None else settings.find()
        self._settings = None if changed or notes else settings
        lines = (*request.lines, *self._lines, *notes) if self._worker.world.is_main else ()
        reply = replace(reply, lines=lines, modules=self._modules.new_imports(), settings=changed)
        sent: dict[str, Payload] = {}
        if request.call is not None and error is None:
            snapshot = before or NamespaceSnapshot.take(self._namespace, (), shared=request.shared)
            try:
                sent[RESULT] = pack_result(
                    self._result, self._namespace, snapshot.shared_ids(), self._worker.payloads, self._worker.world.rank
                )
            except ShippingError as problem:
                outcome = "raised"
                reply = replace(reply, error=make_error_report(problem, [f"ShippingError: {problem}"], self._namespace))
        self._result = None
        packed = self._pack_changes(request, resolved, before, is_complete=outcome == "done")
        if packed is not None and before is not None:
            reply = replace(reply, returned=packed.record, references=self._references(request, before, packed.record))
            sent = {**packed.payloads, **sent}
        return TaskResult(outcome, reply.to_body(), sent, interrupted_exchange=interrupted_exchange)

    def _apply_request(self, request: RunRequest, payloads: Payloads) -> None:
        """Apply the notebook's folder, settings, modules and values; raise ShippingError for values that fail."""
        environment = (request.cwd, request.sys_path, request.variables)
        if environment != self._environment or payloads or request.settings or request.modules or request.reloaded:
            self._environment, self._settings = environment, None
        with suppress(FileNotFoundError):  # the notebook's folder may be absent on another machine
            os.chdir(request.cwd)
        sys.path[:] = request.sys_path
        self._sent_modules.add(request.modules)
        self._apply_environment(request.variables, request.reloaded)
        with kept_log_levels():
            self._modules.begin_run(request.submodules)
        apply_settings(request.settings)
        limit_error_filters()
        send_records(self._send_display)
        if request.follows_failure:
            self._accelerators.discard_windows()
        if not request.has_lost_ranks:
            self._accelerators.close_suspended()
        if (changes := find_payload(payloads, CHANGES, BufferPayload)) is not None:
            with kept_log_levels():
                delta, errors = NamespaceDelta.unpack(changes, self._namespace)
                errors |= delta.apply(self._namespace)
            if errors:
                raise ShippingError("\n".join(_describe_failed_values(errors)))
        if request.has_lost_ranks:
            self._accelerators.drop_suspended()
        self._shell.register_sources(request.sources)

    def _execute_and_finish(self, request: RunRequest, resolved: Resolved) -> BaseException | None:
        """Run the cell or the call, to its end or to the step after which it is stopped; return its error, or None."""
        self._lines = self._accelerators.pop_lines()
        self._control_receiver.begin_run()
        with using_layers(resolved), _receiving_events(self._worker, self._control_receiver):
            try:
                error = self._execute(request, resolved)
            except KeyboardInterrupt as interrupt:
                error = interrupt
        if error is not None:
            for accelerator in self._accelerators.open_accelerators():
                accelerator.end_interrupted_pass()
        if isinstance(error, TrainingStopped) and not self._worker.was_interrupted:
            return self._finish_stopped_cell()
        return error

    def _make_reply(self, request: RunRequest, error: BaseException | None) -> tuple[Outcome, TaskReply]:
        """Return the outcome of a cell, and a reply with its error or with the fingerprints of what it trained."""
        if isinstance(error, KeyboardInterrupt) and self._worker.was_interrupted:
            return "interrupted", TaskReply()
        if error is not None:
            lines = (
                format_traceback(error, self._shell.InteractiveTB)
                if isinstance(error, AccelNbError | KeyboardInterrupt)  # the shell stores no traceback of these
                else self._shell.structured_traceback
            )
            if (hint := explain_error(error, self._accelerators.last_share)) is not None:
                lines = [*lines, hint]
            report = make_error_report(error, lines, self._namespace)
            handled = self._worker.has_raised_interrupt
            return "raised", TaskReply(error=report, memory=self._post_mortem(error, request), was_interrupted=handled)
        if request.is_on_some_ranks or self._worker.was_interrupted:
            return "done", TaskReply(was_interrupted=self._worker.was_interrupted)
        fingerprints = tuple(accelerator.fingerprint() for accelerator in self._accelerators.open_accelerators())
        return "done", TaskReply(fingerprints=fingerprints, values=self._digest_values(request))

    def _digest_values(self, request: RunRequest) -> dict[str, int]:
        """Return digests of the cell's values by name, if all ranks should have equal ones; else none."""
        if not request.is_plain or request.may_depend_on_rank or self._worker.world.size == 1:
            return {}
        has_shares = self._accelerators.last_share is not None
        names = [name for name in (*request.bound, *request.used) if name not in self._shell_names]
        return digest_values(self._namespace, names, with_numbers=not has_shares)

    def _pack_changes(
        self, request: RunRequest, resolved: Resolved, before: NamespaceSnapshot | None, *, is_complete: bool
    ) -> PackedReturn | None:
        """Return the values that have changed since ``before``; None on ranks that return none.

        All ranks must call it. If the cell ``is_complete``, sharded tensors are gathered.
        """

        def collect() -> PackedReturn | None:
            if before is None:
                return None
            states = None if request.rng_digest is None else rng.capture_cpu()
            digest = None if states is None else rng.digest(states)
            return self._result_sender.collect(
                self._namespace,
                before,
                hidden=self._is_hidden,
                wanted=resolved.config.pull,
                rng=None if digest == request.rng_digest else states,
                rng_digest=digest,
                partial_gradients={
                    id(parameter)
                    for accelerator in self._accelerators.open_accelerators()
                    for parameter in accelerator.parameters_with_partial_gradients()
                },
            )

        packed = None
        if is_complete and resolved.config.bring_back and not request.is_on_some_ranks:
            packed = self._accelerators.collect_with_shards(collect, self._is_hidden)
        return collect() if packed is None else packed

    def _read_options(self, document: str) -> Resolved:
        if self._options is None or self._options[0] != document:
            self._options = document, Resolved.from_json(document)
        return self._options[1]

    def _post_mortem(self, error: BaseException, request: RunRequest) -> OutOfMemoryReport | None:
        """Return a report of the objects in memory at an out-of-memory error, None for other errors.

        Release the tensors that the error's frames refer to.
        """
        try:
            device = self._worker.world.device
            return post_mortem.report_out_of_memory(
                error, self._accelerators.open_accelerators(), self._namespace, device=device, source=request.source
            )
        except Exception as problem:  # the report may run out of memory too; the cell's error is reported anyway
            sys.stderr.write(f"no post-mortem of the memory: {type(problem).__name__}: {problem}\n")
            return None
        finally:
            if is_out_of_memory(error):
                post_mortem.release_error_memory(error, self._namespace, request.bound)

    def _apply_environment(self, variables: dict[str, str | None], reloaded: Mapping[str, ReloadMode]) -> None:
        """Apply the notebook's changes of environment variables, and reload the modules that changed."""
        before, self._variables = self._variables, variables
        set_variables({name: value for name, value in variables.items() if name not in before or before[name] != value})
        if reloaded:
            self._modules.reload(reloaded)

    def _take_snapshot(self, request: RunRequest, imported: SharedObjects) -> NamespaceSnapshot:
        names = self._namespace
        used = [name for name in request.used if name in names and not self._is_hidden(name, names[name])]
        return NamespaceSnapshot.take(
            names, used, shared=request.shared, rebound=request.bound, contained=request.contained, imported=imported
        )

    def _references(
        self, request: RunRequest, before: NamespaceSnapshot, returned: ReturnRecord
    ) -> dict[str, list[str]]:
        """Return, by name of each value that the notebook lacks, the names to which the value's code refers."""
        worker_only = {root_name(path).partition(".")[0] for path in returned.not_returned}
        only_here = {name for name in request.used if name in before.bindings and name not in before.shared}
        names = [name for name in sorted(worker_only | only_here) if name in self._namespace]
        return {
            name: names_in_code(name, self._namespace)
            for name in names
            if not self._is_hidden(name, self._namespace[name])
        }

    def _execute(self, request: RunRequest, resolved: Resolved) -> BaseException | None:
        """Run the cell in the shell, or the call, and return the error that it raised, or None."""
        call = request.call
        self._accelerators.reset_share()
        with ExitStack() as stack:
            stack.callback(close_event_writers)
            self._shell.ast_transformers = []
            if not request.is_empty and (request.uses_accelerator or call is None):
                self._shell.ast_transformers = self._open_accelerator(request, resolved, stack)
            if not request.is_empty:
                self._accelerators.synchronize_rng(request, resolved.config.seed)
            error = self._run_source(request) if call is None else self._run_call(call)
            try:
                stack.close()
            except Exception as problem:  # the trained values are returned nevertheless
                if error is not None:
                    self._lines.append(f"after the error, {type(problem).__name__}: {error_text(problem)}")
                error = error or self._keep_traceback(problem)
        if call is None and isinstance(error, KeyboardInterrupt) and self._worker.was_interrupted:
            self._lines += [
                line
                for accelerator in self._accelerators.open_accelerators()
                for line in accelerator.end_interrupted_run()
            ]
        return error

    def _run_source(self, request: RunRequest) -> BaseException | None:
        """Run the cell's source in the shell, and return the error that it or its end raised, or None."""
        shell = self._shell
        shell.cell_text = request.source
        shell.compile.flags = shell.compile.flags & ~FUTURE_FLAGS | request.compiler_flags
        shell.execution_count = request.execution_count
        with self._worker.interruptible():
            result = shell.run_cell(request.source, store_history=False)
            bind_output(self._namespace, result.result)
            error = result.error_before_exec or result.error_in_exec
            if error is None:
                return self._end_run(is_on_some_ranks=request.is_on_some_ranks)
        if isinstance(error, SystemExit):
            message = describe_exit(error)
            shell.structured_traceback = [f"RuntimeError: {message}"]
            return RuntimeError(message)
        return error

    def _end_run(self, *, is_on_some_ranks: bool) -> Exception | None:
        """Complete gradients and saves at the end of a cell; return the error that this raised, or None."""
        try:
            for accelerator in self._accelerators.open_accelerators() if not is_on_some_ranks else ():
                accelerator.complete_held_gradients()
            self._lines += [
                line for accelerator in self._accelerators.open_accelerators() for line in accelerator.end_run()
            ]
        except Exception as problem:  # a full disk, for example
            return self._keep_traceback(problem)
        return None

    def _keep_traceback(self, error: _Error) -> _Error:
        """Store the traceback of an error that the shell has not handled, and return the error."""
        self._shell.structured_traceback = format_traceback(error, self._shell.InteractiveTB)
        return error

    def _open_accelerator(self, request: RunRequest, resolved: Resolved, stack: ExitStack) -> list[ast.NodeTransformer]:
        """Open the accelerator of a cell or call, and the preparation of a plain cell, until ``stack`` is closed.

        Return the transformers of the cell's code.
        """
        is_call = request.call is not None
        is_plain = request.is_plain or (
            request.only_reads_accelerator and not self._accelerators.has_prepared_explicitly()
        )
        kind = "plain" if is_plain else "explicit"
        accelerator = self._accelerators.get_accelerator(kind, resolved, is_on_some_ranks=request.is_on_some_ranks)
        self._accelerators.bind_name(accelerator)
        checkpoint = resolved.config.checkpoint
        for each in self._accelerators.open_accelerators():
            if checkpoint.dir or checkpoint.resume:  # a checkpoint must not contain unreachable objects
                release_unreachable(each, self._namespace)
            each.begin_run(checkpoint.resume)
        if checkpoint.dir is not None:
            stack.enter_context(self._saving_on_sigterm())
        if request.uses_accelerator and not (is_plain or is_call or request.is_on_some_ranks):
            stack.enter_context(warn_if_unprepared(self._worker.world))
        if not (is_plain and resolved.config.prepare):
            return []
        cells = self._accelerators.get_plain_cells(accelerator)
        stack.enter_context(
            cells.run_cell(
                may_depend_on_rank=request.may_depend_on_rank,
                is_on_some_ranks=request.is_on_some_ranks,
                first_rank=request.first_rank,
                entropy=request.entropy,
                namespace=self._namespace,
                at_end=close_event_writers,
            )
        )
        names = [*request.used, *request.bound]
        bound = set(request.bound) - set(request.used)
        stack.enter_context(bound_prepare_function(lambda: cells.prepare(self._namespace, names, bound)))
        return [PrepareInserter()]

    def _finish_stopped_cell(self) -> BaseException | None:
        """Finish a cell that was stopped after a step, on all ranks; return the error that this raised, or None."""
        step = self._control_receiver.stopped_step
        line = f"stopped after step {step:,}, as requested: the rest of the cell did not run"
        try:
            with self._worker.interruptible():
                saved = [
                    line for accelerator in self._accelerators.open_accelerators() for line in accelerator.end_run()
                ]
        except BaseException as error:
            return self._keep_traceback(error)
        self._lines += [line, *saved]
        return None

    def _describe_name(self, name: str) -> str:
        return describe_value(self._namespace[name]) if name in self._namespace else "(no such name in the cell)"

    def _report_memory_snapshot(self, step: int) -> str:
        """Emit a snapshot of this rank's device memory during a run, and return the outcome as text."""
        world = self._worker.world
        try:
            snapshot = device_type(world.device).allocator_snapshot()
            if snapshot is None:
                return NO_MEMORY_SNAPSHOT
            source = self._shell.cell_text
            found = memory_snapshot.make_memory_snapshot(
                snapshot, self._accelerators.open_accelerators(), self._namespace, rank=world.rank, step=step,
                device=world.device, source=source,
            )  # fmt: skip
        except Exception as problem:  # a failed snapshot must not end the training
            return f"no memory snapshot: {type(problem).__name__}: {problem}"
        self._worker.emit(found)
        return "memory snapshot taken"

    def _run_call(self, call: CallRequest) -> BaseException | None:
        """Run the call, store its return value, and return the error that it raised, or None."""
        try:
            with self._worker.interruptible(), patch_environment(**call.variables):
                self._result = self._namespace[call.bound_name]()
                self._lines += [
                    line for accelerator in self._accelerators.open_accelerators() for line in accelerator.end_run()
                ]
        except KeyboardInterrupt as interrupt:
            error: BaseException = interrupt
        except SystemExit as end:
            error = RuntimeError(f"the function called exit() with {end.code!r}; the workers keep running")
        except BaseException as raised:
            error = raised
        else:
            return None
        return self._keep_traceback(error)

    def _pull(self, request: PullRequest) -> TaskResult:
        missing = [name for name in request.names if name not in self._namespace]
        if missing:
            raise UnknownNameError(f"rank {self._worker.world.rank} has no name {', '.join(map(repr, missing))}")

        def collect() -> PackedReturn | None:
            if not self._worker.world.is_main:
                return None
            before = NamespaceSnapshot.take(self._namespace, [], shared=request.shared)
            return self._result_sender.collect(
                self._namespace,
                before,
                hidden=lambda name, value: name not in request.names,
                wanted=request.names,
            )

        packed = self._accelerators.collect_with_shards(collect, self._is_hidden) or collect()
        if packed is None:
            return TaskResult("done", TaskReply().to_body())
        return TaskResult("done", TaskReply(returned=packed.record).to_body(), packed.payloads)

    @contextmanager
    def _saving_on_sigterm(self) -> Iterator[None]:
        """Save a checkpoint at the end of a step on SIGTERM, instead of ending this rank, while the block runs."""

        def request_checkpoint(signum: int, frame: object) -> None:
            for accelerator in self._accelerators.open_accelerators():
                accelerator.request_checkpoint()

        before = signal.signal(signal.SIGTERM, request_checkpoint)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _is_hidden(self, name: str, value: Any) -> bool:
        return (
            name in self._shell_names or name == ACCELERATOR_NAME or is_reserved(name) or isinstance(value, Accelerator)
        )

    def _send_display(self, topic: str, body: dict[str, Any]) -> None:
        self._worker.send_message_in_order(topic, body)


def _describe_failed_values(errors: dict[str, Exception]) -> list[str]:
    return [
        f"an attribute that the notebook has set on an imported module or class {reason}. Set it inside the cell."
        if path == SENT_NAME
        else f"`{root_name(path)}` {reason}. Make it inside the %%accelerate cell, or leave it out of the cell."
        for path, reason in describe_failures(errors, "on the workers").items()
    ]


def warm() -> TaskResult:
    """Create the shell and run a cell with a call in the zygote, so that forked workers share this memory.

    Returns the result of the cell.
    """
    program = CellProgram(ZygoteWorker())
    request = RunRequest("int()", config=resolve([]).to_json(), cwd=os.getcwd(), sys_path=tuple(sys.path))
    result = program.handle("run", to_body(request), {})
    program.on_group_reopened()
    for name in (ACCELERATOR_NAME, OUTPUT_NAME):
        program._namespace.pop(name, None)
    if (rules := sys.modules.get("torch._dynamo.trace_rules")) is not None:
        rules.clear_lru_cache()  # init_process_group clears it too; an empty cache is not copied in each worker
    return result


@contextmanager
def _receiving_events(worker: CellWorker, receiver: ControlReceiver) -> Iterator[None]:
    token, receiver_token = current_sink.set(worker), current_control_receiver.set(receiver)
    try:
        yield
    finally:
        current_control_receiver.reset(receiver_token)
        current_sink.reset(token)
