"""The processes of one notebook's workers: their engine, and the pool that runs on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from accel_nb.config.engine_section import EngineOptions
from accel_nb.errors import PoolError
from accel_nb.notebook.output.cell_output import IMPORTING, STARTING
from accel_nb.notebook.session.environment_sync import has_other_gpus
from accel_nb.pool.engine import Engine, EngineFacts, WorkerSpec
from accel_nb.pool.pool import POLL_S, Pool

EngineFactory = Callable[[EngineOptions, Mapping[str, str]], Engine]
"""Starts the engine of a session; the given environment variables replace the notebook's in its workers."""
LOCAL = EngineOptions()
CONNECT_TIMEOUT_S = 30.0
"""How long `%accelerate connect` waits for the reports of all nodes, in seconds."""


class NotebookWorkers:
    """Starts, replaces and ends the processes. None starts before `warm_up`, `connect` or `ensure_pool`.

    ``on_lost`` is called when workers were replaced or will be, and ``on_stop`` when every process has ended.
    """

    def __init__(
        self,
        start_engine: EngineFactory,
        overrides: Mapping[str, str],
        on_lost: Callable[[], object],
        on_stop: Callable[[], object],
    ) -> None:
        self._start_engine = start_engine
        self._overrides = overrides
        self._on_lost = on_lost
        self._on_stop = on_stop
        self._engine: Engine | None = None
        # The options that the engine was started with.
        self._options = LOCAL
        self.pool: Pool | None = None
        """The pool; None before `ensure_pool` and after its end."""

    def warm_up(self, options: EngineOptions = LOCAL) -> Engine:
        """Start the engine, if none runs; the local one starts its zygote in the background and returns at once."""
        if self._engine is None:
            self._engine = self._start_engine(options, self._overrides)
            self._options = options
        return self._engine

    def connect(self, options: EngineOptions) -> None:
        """Start the engine, and return when each node has reported its machine. Raises PoolError if one does not."""
        engine = self.warm_up(options)
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while len((facts := engine.facts()).machines) + len(facts.lost_nodes) < len(facts.nodes):
            if time.monotonic() > deadline:
                self.stop()
                raise PoolError(f"not all nodes have answered within {CONNECT_TIMEOUT_S:g} s")
            engine.poll(POLL_S)  # raises if a node reports an error

    def facts(self) -> EngineFacts | None:
        """Return the latest known state of the engine; None if none runs. Thread-safe."""
        return None if self._engine is None else self._engine.facts()

    def lost_nodes(self, options: EngineOptions) -> Mapping[int, str]:
        """Return the nodes that the engine of these options has lost, with the reasons."""
        return self._engine.facts().lost_nodes if self._engine is not None and self._options == options else {}

    def poll(self) -> None:
        """Process events of the workers, such as deaths, without waiting."""
        if self.pool is not None:
            self._replace_dead(self.pool)
        elif self._engine is not None:
            self._engine.refresh()

    def ensure_pool(
        self,
        specs: Sequence[WorkerSpec],
        options: EngineOptions,
        start_timeout_s: float,
        on_phase: Callable[[str], object] = lambda phase: None,
    ) -> Pool:
        """Return a pool of live workers on these devices; start or replace workers as needed.

        An engine that was started with other options is stopped first. ``on_phase`` is called with a description of
        what it waits for.
        """
        if self._engine is not None and self._options != options:
            self.stop()
        if self.pool is not None:
            if self.pool.specs == tuple(specs):
                self._replace_dead(self.pool)
            if self.pool.specs != tuple(specs) or self.pool.state != "ready":
                self.discard_pool()
        if self.pool is None:
            if self._engine is not None and has_other_gpus(self._engine.facts().variables):
                self.stop()
            engine = self.warm_up(options)
            try:
                self.pool = Pool(engine, specs)
                self.pool.wait_ready(
                    timeout_s=start_timeout_s,
                    on_wait=lambda: on_phase(STARTING if engine.facts().is_warm else IMPORTING),
                )
            except BaseException:
                facts = engine.facts()
                if 0 < len(facts.lost_nodes) < len(facts.nodes):
                    self.discard_pool()  # the next cell runs on the nodes that remain
                else:
                    self.stop()
                raise
        return self.pool

    def require_pool(self) -> Pool:
        """Return the pool, with dead workers replaced. Raises PoolError if none runs, or it has failed."""
        if self.pool is None:
            raise PoolError("no workers run; the first %%accelerate cell starts them")
        self._replace_dead(self.pool)
        if self.pool.state != "ready":
            raise PoolError(
                "the workers failed; the next %%accelerate cell, or `%accelerate restart`, starts fresh ones"
            )
        return self.pool

    def _replace_dead(self, pool: Pool) -> None:
        """Replace workers that have died. An interrupt ends all of them, since partly started ones cannot be used."""
        try:
            has_replaced = pool.replace_dead()
        except BaseException:
            self.stop()
            raise
        if has_replaced:
            self._on_lost()

    def discard_pool(self) -> None:
        """End the workers, and keep the engine."""
        if self.pool is not None and self._engine is not None:
            self.pool.detach()
            self.pool = None
            self._on_lost()

    def stop(self) -> None:
        """End every process. Does nothing when no process runs, except calling ``on_stop``."""
        if self.pool is not None:
            self.pool.close()
        elif self._engine is not None:
            self._engine.stop()
        self.pool = self._engine = None
        self._on_stop()
