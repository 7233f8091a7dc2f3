"""The state of a training run: collecting it for a checkpoint, and restoring it from one."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accel_nb.accelerator.state.run_observer import RunObserver
from accel_nb.accelerator.state.save_report import CompletedSave
from accel_nb.accelerator.state.state_matching import format_mismatches, match_state, with_tied
from accel_nb.accelerator.tracking.tracked_run import TrackedRun
from accel_nb.accelerator.training.stepper import REFUSED_IN_JOIN, Stepper
from accel_nb.checkpoint.accelerate_format import AccelerateState, is_accelerate_folder, read_accelerate_folder
from accel_nb.checkpoint.background_save import CheckpointSaver
from accel_nb.checkpoint.encoding import FromRankZero, Slice
from accel_nb.checkpoint.interval import SaveCost
from accel_nb.checkpoint.layout import Region, format_step_name
from accel_nb.checkpoint.load import StoredCheckpoint, StoredTensor, materialize, open_checkpoint
from accel_nb.checkpoint.manifest import CheckpointOrigin
from accel_nb.checkpoint.save import ReservedFolder, reserve_folder
from accel_nb.checkpoint.store_url import open_store, split_url
from accel_nb.config import Resolved
from accel_nb.data.loader import explain_no_resume, get_position, resume_loader
from accel_nb.data.position import LoaderPosition
from accel_nb.errors import CheckpointError, MisuseError, NoCheckpoint
from accel_nb.runtime import rng
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.distributed.communicator import Communicator, LocalComm
from accel_nb.runtime.distributed.gradients import any_rank_has_gradient
from accel_nb.runtime.process.secrets import redact, redacted
from accel_nb.runtime.tensors.state_tree import map_state
from accel_nb.runtime.world import World

SaveHook = Callable[[list[nn.Module], list[Any], str], None]
LoadHook = Callable[[list[nn.Module], str], None]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The loaded checkpoint, and a note for each part of the state that is not restored exactly."""

    url: str
    step: int
    saved_world_size: int
    world_size: int
    notes: tuple[str, ...] = ()
    positions: tuple[LoaderPosition, ...] = ()
    """The position at which each loader resumes, in the order of preparation."""

    def __str__(self) -> str:
        text = f"loaded {self.url}: step {self.step}, saved by {self.saved_world_size} ranks, now {self.world_size}"
        return redact("\n".join([text, *(f"  {note}" for note in self.notes)]))


class HookHandle:
    """Removes a hook."""

    def __init__(self, hooks: dict[HookHandle, Any]) -> None:
        self._hooks = hooks

    def remove(self) -> None:
        """Remove the hook; further calls do nothing."""
        self._hooks.pop(self, None)


class TrainingState:
    """Saves and loads the training state of one accelerator; every rank must make the same calls."""

    def __init__(
        self,
        comm: Communicator,
        device: torch.device,
        stepper: Stepper,
        resolved: Resolved,
        *,
        prepared: Callable[[], Sequence[Any]],
        tracked: TrackedRun,
        observer: RunObserver,
    ) -> None:
        """Begin without hooks; ``prepared`` returns every prepared object, in the order of preparation."""
        self._comm = comm
        self._device = device
        self._stepper = stepper
        self._resolved = resolved
        self._prepared = prepared
        self._saver = CheckpointSaver(comm, device)
        # Identifies the training run: equal in all its checkpoints, also in those saved after a resume.
        self._run = uuid.uuid4().hex[:12]
        self._registered: list[Any] = []
        self._save_hooks: dict[HookHandle, SaveHook] = {}
        self._load_hooks: dict[HookHandle, LoadHook] = {}
        self._tracked = tracked
        self._observer = observer
        # The latest save until it is reported: its step, its URL, and for how many seconds it blocked the training.
        self._unreported_save: tuple[int, str, float] | None = None
        # By number of a loader in the loaded checkpoint that is not prepared yet: the arguments to resume it.
        self._unprepared_positions: dict[int, tuple[LoaderPosition, bool, Callable[[], object] | None]] = {}

    def register(self, objects: Sequence[Any]) -> None:
        """Add objects to checkpoints; raises `MisuseError` for one without ``state_dict`` or ``load_state_dict``."""
        for item in objects:
            lacking = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(item, name, None))]
            if lacking:
                raise MisuseError(f"a {type(item).__name__} cannot be registered: it has no {' and no '.join(lacking)}")
        self._registered += [item for item in objects if not any(item is known for known in self._registered)]

    def add_save_hook(self, hook: SaveHook) -> HookHandle:
        """Call ``hook(models, weights, url)`` before each save."""
        return _add_hook(self._save_hooks, hook)

    def add_load_hook(self, hook: LoadHook) -> HookHandle:
        """Call ``hook(models, url)`` before each load."""
        return _add_hook(self._load_hooks, hook)

    def save(self, output_dir: str | os.PathLike[str] | None, *, blocking: bool, is_alone: bool = False) -> str:
        """Write a checkpoint and return its URL; see `Accelerator.save_state`.

        With ``is_alone`` no other rank calls. Then the checkpoint is saved as by a world of one rank, and is complete
        when the call returns.
        """
        if self._stepper.is_joined and not is_alone:
            raise MisuseError(f"save_state: {REFUSED_IN_JOIN}")
        options = self._resolved.config.checkpoint
        comm: Communicator = LocalComm() if is_alone else self._comm
        saver = CheckpointSaver(comm, self._device) if is_alone else self._saver
        keep = None
        if output_dir is not None:
            root, name = split_url(output_dir)
        elif options.dir is not None:
            root, name, keep = options.dir, format_step_name(self._stepper.num_steps), options.total_limit
        else:
            raise MisuseError(f"save_state() needs a folder: {_NO_FOLDER}")
        started = time.monotonic()
        store = open_store(root)
        if not is_alone:
            self.wait()
            self._stepper.average_replicas()  # each rank writes some of the tensors
        # Hooks write into the temporary folder of the checkpoint, which is renamed when it is complete.
        place: ReservedFolder | None = None
        # A folder that the user has named is replaced, as by torch.save, since cells and scripts are run repeatedly.
        may_replace = output_dir is not None
        if self._save_hooks and store.supports_rename:
            place = reserve_folder(store, name, self._run, comm, may_replace=may_replace)
        try:
            tree = self._state_tree(
                comm, f"{store.url}/{name}", f"{store.url}/{name if place is None else place.folder}"
            )
        except BaseException:
            if place is not None and comm.world.is_main:
                store.discard(place.folder, ())
            raise
        url = saver.save(
            store,
            name,
            tree,
            self._build_origin(comm),
            blocking=blocking,
            keep=keep,
            reserved=place,
            may_replace=may_replace,
        )
        stall_s = time.monotonic() - started
        if is_alone:
            cost = SaveCost(saver.num_bytes, stall_s, stall_s)
            self._observer.on_checkpoint_saved(CompletedSave(self._stepper.num_steps, url, cost))
            return url
        self._unreported_save = self._stepper.num_steps, url, stall_s
        if blocking:
            self._report_save()
        return url

    @property
    def is_behind(self) -> bool:
        """Whether the save in the background takes longer than a new save should wait."""
        return self._saver.is_slow

    def end_replay(self) -> None:
        """End the replay of finished epochs, in which loops yield no batches after a resume."""
        self._stepper.is_replaying = False

    def wait(self) -> None:
        """Wait for the save in the background."""
        self._report_after(self._saver.wait)

    def close(self, *, is_alone: bool) -> None:
        """Wait for the save in the background, and raise if it failed; with ``is_alone``, abandon a slow one."""
        if is_alone:
            self._saver.close_alone()
            return
        self._report_after(self._saver.close)

    def _report_after(self, complete: Callable[[], None]) -> None:
        """Call a method that waits for the save in the background, and report the save unless it failed."""
        try:
            complete()
        except BaseException:
            self._unreported_save = None
            raise
        self._report_save()

    def _report_save(self) -> None:
        unreported, self._unreported_save = self._unreported_save, None
        if unreported is not None:
            step, url, stall_s = unreported
            cost = SaveCost(self._saver.num_bytes, stall_s, max(self._saver.last_duration_s, stall_s))
            self._observer.on_checkpoint_saved(CompletedSave(step, url, cost))

    def _state_tree(self, comm: Communicator, url: str, draft_url: str) -> dict[str, Any]:
        """Return the state of the ranks of ``comm`` as a tree; tensors are not copied. Hooks receive ``draft_url``."""
        bundle, window = self._stepper.bundle, self._stepper.window
        if window.num_pending and self._stepper.strategy.capabilities.holds_gradients:
            raise CheckpointError(
                f"{url} was not saved: strategy {self._stepper.strategy.name!r} cannot store the gradients of an "
                f"accumulation window that is open ({window.num_pending} of {window.size} batches); save after a step"
            )
        state = self._stepper.strategy.read_state(bundle, copied=False)
        weights = state["models"]
        self._run_save_hooks(weights, draft_url)
        return {
            "models": [_model_state(model, values) for model, values in zip(bundle.models, weights, strict=False)],
            "optimizers": state["optimizers"],
            "schedulers": state["schedulers"],
            "precision": state["precision"],
            "rng": self._random_state(comm.world),
            "progress": {"step": self._stepper.num_steps, "held": window.num_pending, "accumulate": window.size},
            "gradients": self._gradients() if window.num_pending else None,
            "registered": [item.state_dict() for item in self._registered],
            "data": [get_position(loader).to_json() for loader in self.loaders()],
            "tracked": self._tracked.state(comm),
        }

    def call_save_hooks(self, folder: str) -> None:
        """Call the hooks of a save on a rank that writes nothing of the checkpoint; they get ``folder`` to write to."""
        if self._save_hooks:
            self._run_save_hooks(
                self._stepper.strategy.read_state(self._stepper.bundle, copied=False)["models"], folder
            )

    def _run_save_hooks(self, weights: Any, url: str) -> None:
        for hook in list(self._save_hooks.values()):
            hook(list(self._stepper.bundle.models), weights, url)

    def resume_loader(self, loader: DataLoader[Any]) -> None:
        """Resume a loader that was just prepared, if the loaded checkpoint has its position."""
        if not self._unprepared_positions:
            return
        number = next(index for index, known in enumerate(self.loaders()) if known is loader)
        position, passes, on_resume = self._unprepared_positions.pop(number, (None, False, None))
        if position is None:
            return
        problem = explain_no_resume(loader, position)
        if problem is not None:
            raise CheckpointError(problem)
        resume_loader(loader, position, passes=passes, on_resume=on_resume)

    def load(
        self, input_dir: str | os.PathLike[str] | None, *, strict: bool, skips_finished: bool = False
    ) -> LoadReport:
        """Restore a checkpoint; see `Accelerator.load_state`.

        With ``skips_finished`` loaders yield no batches in epochs that the checkpoint has finished. Random states are
        restored once more before the first batch after these epochs, since code between the loops may draw numbers.
        """
        self.wait()
        where = self._resolved.config.checkpoint.dir if input_dir is None else input_dir
        if where is None:
            raise MisuseError(f"load_state() needs a folder: {_NO_FOLDER}")
        try:
            checkpoint = open_checkpoint(where, self._comm)
        except NoCheckpoint as error:
            if is_accelerate_folder(where):
                raise NoCheckpoint(f"{error}; a folder of accelerate is read by {_ACCELERATE_CALL}") from None
            raise
        tree: dict[str, Any] = {}
        problem: str | None = None
        try:
            tree = checkpoint.read_tree()
        except CheckpointError as error:
            problem = str(error)
        self._raise_on_all_ranks(problem)
        models = list(self._stepper.bundle.models)
        for hook in list(self._load_hooks.values()):
            hook(models, checkpoint.url)
        bundle = replace(self._stepper.bundle, models=tuple(models))
        live = self._stepper.strategy.read_state(bundle, copied=False)
        state, problems = match_state(tree, live, bundle, self._registered)
        positions = [LoaderPosition.from_json(values) for values in tree.get("data", [])]
        self._unprepared_positions.clear()
        self._raise_on_all_ranks(format_mismatches(checkpoint.url, problems) if problems and strict else None)
        self._raise_on_all_ranks(self._resume_loaders(positions, skips_finished, tree, checkpoint))
        notes = [f"passed over: {reason}" for reason in checkpoint.skipped] + problems
        if not tree["precision"] and live["precision"]:
            state["precision"] = live["precision"]
            notes.append("the loss scale is the initial one: the checkpoint was saved without fp16")
        strategy = self._stepper.strategy
        strategy.write_state(bundle, state if strategy.capabilities.shards_params else materialize(state))
        for item, values in zip(self._registered, tree["registered"], strict=False):
            item.load_state_dict(_copy_tensors(materialize(values)))
        notes += self._restore_window(tree, checkpoint)
        notes += self._restore_random(tree, checkpoint)
        self._run = checkpoint.manifest.origin.run
        notes += self._tracked.restore(tree.get("tracked"), tree["progress"]["step"])
        self._observer.on_checkpoint_loaded(tree["progress"]["step"])
        report = LoadReport(
            checkpoint.url,
            tree["progress"]["step"],
            checkpoint.manifest.origin.world_size,
            self._comm.world.size,
            tuple(notes),
            tuple(positions),
        )
        if self._comm.world.is_main and checkpoint.skipped:
            warnings.warn(str(report), stacklevel=3)
        return report

    def load_accelerate_folder(self, folder: str | os.PathLike[str], *, strict: bool) -> LoadReport:
        """Restore a folder that ``accelerate`` has saved; see `Accelerator.load_state`."""
        self.wait()
        found = AccelerateState(os.fspath(folder))
        problem: str | None = None
        try:
            found = read_accelerate_folder(folder)
        except CheckpointError as error:
            problem = str(error)
        self._raise_on_all_ranks(problem)
        bundle = self._stepper.bundle
        live = self._stepper.strategy.read_state(bundle, copied=False)
        tree = {
            "models": [
                {"values": with_tied(values, model), "versions": {}}
                for values, model in zip(found.models, bundle.models, strict=False)
            ]
            + [{"values": values, "versions": {}} for values in found.models[len(bundle.models) :]],
            "optimizers": found.optimizers,
            "schedulers": found.schedulers,
            "registered": found.registered,
            "precision": found.precision,
        }
        state, problems = match_state(tree, live, bundle, self._registered)
        self._raise_on_all_ranks(format_mismatches(found.url, problems) if problems and strict else None)
        notes = [*problems, *found.unread]
        if not found.precision and live["precision"]:
            state["precision"] = live["precision"]
            notes.append("the loss scale is the initial one: it was saved without fp16")
        if found.schedulers and len(found.random) > 1:
            notes.append(
                f"the schedulers were saved by {len(found.random)} processes: accelerate may have advanced them that "
                "many times in each step, and here they advance once"
            )
        self._stepper.strategy.write_state(bundle, state)
        for item, values in zip(self._registered, found.registered, strict=False):
            item.load_state_dict(values)
        self._stepper.strategy.drop_gradients(bundle)
        self._stepper.resume_at(found.step, 0)
        rank, size = self._comm.world.rank, self._comm.world.size
        if len(found.random) == size:
            rng.restore(found.random[rank], self._device)
        else:
            notes.append(
                f"random states are not restored: {len(found.random)} processes have saved theirs, and {size} load"
            )
        self._observer.on_checkpoint_loaded(found.step)
        return LoadReport(found.url, found.step, max(len(found.random), 1), size, tuple(notes))

    def loaders(self) -> list[DataLoader[Any]]:
        """Return the prepared loaders, in the order of preparation."""
        return [item for item in self._prepared() if isinstance(item, DataLoader)]

    def _resume_loaders(
        self, positions: list[LoaderPosition], passes: bool, tree: dict[str, Any], checkpoint: StoredCheckpoint
    ) -> str | None:
        """Resume the prepared loaders, and record the positions of others.

        Return the reason if one cannot resume, else None.
        """
        restored = False

        def restore() -> None:
            nonlocal restored
            if not restored:
                restored, self._stepper.is_replaying = True, False
                self._restore_random(tree, checkpoint)

        on_resume = restore if passes else None
        loaders = self.loaders()
        known = list(zip(loaders, positions, strict=False))
        for loader, position in known:
            problem = explain_no_resume(loader, position)
            if problem is not None:
                return f"{checkpoint.url}: {problem}"
        for loader, position in known:
            resume_loader(loader, position, passes=passes, on_resume=on_resume)
        self._stepper.is_replaying = passes and any(position.num_epochs for position in positions)
        self._unprepared_positions = {
            number: (position, passes, on_resume) for number, position in enumerate(positions) if number >= len(loaders)
        }
        return None

    def _raise_on_all_ranks(self, problem: str | None) -> None:
        """Raise `CheckpointError` on every rank if any rank has a problem, so that no rank continues alone."""
        for rank, text in enumerate(self._comm.all_gather_json(problem)):
            if text is not None:
                raise CheckpointError(f"rank {rank}: {text}" if rank else text)

    def _build_origin(self, comm: Communicator) -> CheckpointOrigin:
        return CheckpointOrigin(
            run=self._run,
            step=self._stepper.num_steps,
            world_size=comm.world.size,
            strategy=self._stepper.strategy.name,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            config=redacted(self._resolved.config.model_dump(mode="json")),
            versions={"accel_nb": version("accel_nb"), "torch": torch.__version__},
        )

    # --- random numbers ---

    def _random_state(self, world: World) -> dict[str, Any]:
        """Return generator states, a row for each share of the data, and the seed for other numbers of ranks."""
        rank, size = (0, 1) if world.size == 1 else self._stepper.strategy.data_coords()
        states = rng.capture(self._device)
        seed = self._resolved.config.seed
        if seed is None:
            digest = hashlib.blake2b(states["torch"].numpy().tobytes(), digest_size=8).digest()
            seed = int.from_bytes(digest, "big") >> 1
        rows = {
            name: Slice(value[None], (rank, *(0 for _ in value.shape)), (size, *value.shape))
            for name, value in states.items()
        }
        return {"seed": seed, "states": rows, "apart": self._stepper.has_rank_rng}

    def _restore_random(self, tree: dict[str, Any], checkpoint: StoredCheckpoint) -> list[str]:
        rank, size = self._stepper.strategy.data_coords()
        saved: dict[str, StoredTensor] = tree["rng"]["states"]
        before = next(iter(saved.values())).shape[0]
        row = rank if before == size else 0
        rng.restore({name: _row(value, row).clone() for name, value in saved.items()}, self._device)
        self._stepper.has_rank_rng = tree["rng"]["apart"]
        if before == size or size == 1 or not self._stepper.has_rank_rng:
            return []
        if rank > 0:
            rng.set_seed(rng.derive_seed(tree["rng"]["seed"], "step", tree["progress"]["step"], "rank", rank))
        return [f"random states of ranks above 0 are derived from (seed, step, rank): {before} saved, {size} load"]

    # --- the open accumulation window ---

    def _gradients(self) -> list[dict[str, Slice]]:
        """Return the accumulated gradients of the open window: for each tensor a row of each rank.

        Sharded gradients have a single row, their mean over ranks.
        """
        rank, size = self._stepper.strategy.data_coords()
        parameters = [
            (index, name, value)
            for index, model in enumerate(self._stepper.bundle.models)
            for name, value in model.named_parameters()
            if value.requires_grad
        ]
        has_gradient = any_rank_has_gradient(self._comm, [value for _, _, value in parameters])
        found: list[dict[str, Slice]] = [{} for _ in self._stepper.bundle.models]
        for (index, name, value), is_present in zip(parameters, has_gradient, strict=True):
            if not is_present:
                continue
            own = sharded.local_shard(value)
            gradient = torch.zeros_like(own) if value.grad is None else sharded.local_shard(value.grad)
            if sharded.is_sharded(value):  # one row, the mean over ranks; each rank stores its shard
                start, num_rows, place = sharded.own_region(value)[0], 1, 0
            else:
                start, num_rows, place = (0,) * value.dim(), size, rank
            offsets = (place, *start)
            found[index][name] = Slice(gradient.detach()[None], offsets, (num_rows, *value.shape))
        return found

    def _restore_window(self, tree: dict[str, Any], checkpoint: StoredCheckpoint) -> list[str]:
        window, progress = self._stepper.window, tree["progress"]
        self._stepper.strategy.drop_gradients(self._stepper.bundle)
        held, notes = progress["held"], []
        if held and progress["accumulate"] != window.size:
            held = 0
            notes.append(
                f"an open accumulation window was dropped: it was saved with accumulate {progress['accumulate']}, and "
                f"now it is {window.size}"
            )
        if held and self._stepper.strategy.capabilities.holds_gradients:
            held = 0
            notes.append(
                f"an open accumulation window was dropped: strategy {self._stepper.strategy.name!r} cannot restore its "
                "gradients"
            )
        if held:
            for model, gradients in zip(self._stepper.bundle.models, tree["gradients"], strict=False):
                self._restore_gradients(model, gradients)
        self._stepper.resume_at(progress["step"], held)
        return notes

    def _restore_gradients(self, model: nn.Module, saved: dict[str, StoredTensor]) -> None:
        """Restore each rank's gradients; with another number of ranks, rank 0 gets the sum, scaled to the same mean."""
        rank, size = self._stepper.strategy.data_coords()
        for name, value in model.named_parameters():
            if name not in saved:
                continue
            num_rows = saved[name].shape[0]
            if sharded.is_sharded(value):
                gradient = sharded.own_shard(value, saved[name].read().mean(0))
                value.grad = sharded.shard_like(value, gradient.to(value.device, value.dtype))
                continue
            if num_rows == size:
                gradient = _row(saved[name], rank).clone()
            elif rank == 0:
                gradient = saved[name].read().sum(0) * (size / num_rows)
            else:
                gradient = torch.zeros(value.shape, dtype=value.dtype, device="cpu")
            value.grad = gradient.to(value.device, value.dtype)


_ACCELERATE_CALL = "load_state(PATH, layout='accelerate')"
_NO_FOLDER = (
    "give one, as in save_state('checkpoints/step_100'), or set checkpoint.dir (flag --checkpoint, or "
    "config={'checkpoint': {'dir': ...}}), which names checkpoints step_N by itself"
)


def _add_hook(hooks: dict[HookHandle, Any], hook: Any) -> HookHandle:
    handle = HookHandle(hooks)
    hooks[handle] = hook
    return handle


def _row(stored: StoredTensor, row: int) -> Tensor:
    """Return one row of a stored tensor, without reading the others."""
    rest = stored.shape[1:]
    return stored.read(Region((row, *(0 for _ in rest)), (1, *rest)))[0]


def _copy_tensors(tree: Any) -> Any:
    """Return a tree with copies of its tensors, which are views of a file that will be closed."""
    return map_state(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def _model_state(model: nn.Module, values: Any) -> dict[str, Any]:
    """Return a model's tensors and the versions of its modules; buffers, which may differ among ranks, are rank 0's."""
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return {
        "values": {
            name: FromRankZero(value) if name in buffers and isinstance(value, Tensor) else value
            for name, value in values.items()
        },
        "versions": {prefix: dict(metadata) for prefix, metadata in getattr(values, "_metadata", {}).items()},
    }
