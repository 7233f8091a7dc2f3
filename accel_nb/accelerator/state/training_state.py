"""The state of a training run: collected into one tree for a checkpoint, checked against what is live, and put back."""

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
from accel_nb.accelerator.training.stepper import Stepper
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
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.gradients import any_rank_has_gradient
from accel_nb.runtime.process.secrets import redact, redacted
from accel_nb.runtime.tensors.state_tree import map_state

SaveHook = Callable[[list[nn.Module], list[Any], str], None]
LoadHook = Callable[[list[nn.Module], str], None]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was loaded, and what does not go on exactly as it was, one note each."""

    url: str
    step: int
    saved_world_size: int
    world_size: int
    notes: tuple[str, ...] = ()
    positions: tuple[LoaderPosition, ...] = ()
    """Where each loader goes on, in the order in which they were prepared."""

    def __str__(self) -> str:
        text = f"loaded {self.url}: step {self.step}, saved by {self.saved_world_size} ranks, now {self.world_size}"
        return redact("\n".join([text, *(f"  {note}" for note in self.notes)]))


class HookHandle:
    """Takes a hook away again."""

    def __init__(self, hooks: dict[int, Any]) -> None:
        self._hooks = hooks

    def remove(self) -> None:
        """Take the hook away; may be called again."""
        self._hooks.pop(id(self), None)


class TrainingState:
    """Saves and loads what one accelerator trains; every rank makes the same calls."""

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
        """``prepared`` returns every prepared object, in the order of preparation."""
        self._comm = comm
        self._device = device
        self._stepper = stepper
        self._resolved = resolved
        self._prepared = prepared
        self._saver = CheckpointSaver(comm, device)
        # The same for all checkpoints of a training, those after a resume included.
        self._run = uuid.uuid4().hex[:12]
        self._registered: list[Any] = []
        self._save_hooks: dict[int, SaveHook] = {}
        self._load_hooks: dict[int, LoadHook] = {}
        self._tracked = tracked
        self._observer = observer
        # The save that is on its way: its step, where it goes, and for how many seconds it held the training up.
        self._begun: tuple[int, str, float] | None = None
        # Of loaders that a checkpoint knows and that are not prepared yet, by their number.
        self._waiting: dict[int, tuple[LoaderPosition, bool, Callable[[], object] | None]] = {}

    def register(self, objects: Sequence[Any]) -> None:
        """Save and load these objects too; raises `MisuseError` for one without the two methods that it takes."""
        for item in objects:
            lacking = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(item, name, None))]
            if lacking:
                raise MisuseError(f"a {type(item).__name__} cannot be registered: it has no {' and no '.join(lacking)}")
        self._registered += [item for item in objects if not any(item is known for known in self._registered)]

    def add_save_hook(self, hook: SaveHook) -> HookHandle:
        """Call ``hook(models, weights, url)`` before each save."""
        return _add(self._save_hooks, hook)

    def add_load_hook(self, hook: LoadHook) -> HookHandle:
        """Call ``hook(models, url)`` before each load."""
        return _add(self._load_hooks, hook)

    def save(self, output_dir: str | os.PathLike[str] | None, *, blocking: bool) -> str:
        """Write a checkpoint and return where it is; see `Accelerator.save_state`."""
        options = self._resolved.config.checkpoint
        keep = None
        if output_dir is not None:
            root, name = split_url(output_dir)
        elif options.dir is not None:
            root, name, keep = options.dir, format_step_name(self._stepper.num_steps), options.total_limit
        else:
            raise MisuseError(f"save_state() needs a folder: {_NO_FOLDER}")
        started = time.monotonic()
        store = open_store(root)
        self.wait()
        # Hooks write into the checkpoint's own folder, which becomes complete with their files in it.
        place: ReservedFolder | None = None
        # A name of the user's own is written over, as in torch.save: a cell or a script is run again.
        may_replace = output_dir is not None
        if self._save_hooks and store.supports_rename:
            place = reserve_folder(store, name, self._run, self._comm, may_replace=may_replace)
        try:
            tree = self.state_tree(f"{store.url}/{name}", f"{store.url}/{name if place is None else place.folder}")
        except BaseException:
            if place is not None and self._comm.world.is_main:
                store.discard(place.folder, ())
            raise
        url = self._saver.save(
            store, name, tree, self._facts(), blocking=blocking, keep=keep, reserved=place, may_replace=may_replace
        )
        self._begun = self._stepper.num_steps, url, time.monotonic() - started
        if blocking:
            self._tell_saved()
        return url

    @property
    def is_behind(self) -> bool:
        """Whether the save in the background is slower than one waits for."""
        return self._saver.is_slow

    def end_replay(self) -> None:
        """Hear that no more loops of finished epochs pass by."""
        self._stepper.is_replaying = False

    def wait(self) -> None:
        """Wait for the save in the background."""
        self._saver.wait()
        self._tell_saved()

    def close(self, *, is_alone: bool) -> None:
        """Wait for the save in the background, and raise if it failed; alone, give it up if it takes longer."""
        if is_alone:
            self._saver.close_alone()
            return
        self._saver.close()
        self._tell_saved()

    def _tell_saved(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            step, url, stall_s = begun
            cost = SaveCost(self._saver.num_bytes, stall_s, max(self._saver.last_duration_s, stall_s))
            self._observer.on_checkpoint_saved(CompletedSave(step, url, cost))

    def state_tree(self, url: str, draft_url: str | None = None) -> dict[str, Any]:
        """Return the state tree, whose tensors are the live ones; hooks are given ``draft_url``, or else ``url``."""
        bundle, window = self._stepper.bundle, self._stepper.window
        if window.num_pending and self._stepper.strategy.capabilities.hides_gradients:
            raise CheckpointError(
                f"{url} was not saved: strategy {self._stepper.strategy.name!r} cannot store the gradients of an "
                f"accumulation window that is open ({window.num_pending} of {window.size} batches); save after a step"
            )
        state = self._stepper.strategy.read_state(bundle, copied=False)
        weights = state["models"]
        for hook in list(self._save_hooks.values()):
            hook(list(bundle.models), weights, draft_url or url)
        return {
            "models": [_model_state(model, values) for model, values in zip(bundle.models, weights, strict=False)],
            "optimizers": state["optimizers"],
            "schedulers": state["schedulers"],
            "precision": state["precision"],
            "rng": self._random_state(),
            "progress": {"step": self._stepper.num_steps, "held": window.num_pending, "accumulate": window.size},
            "gradients": self._gradients() if window.num_pending else None,
            "registered": [item.state_dict() for item in self._registered],
            "data": [get_position(loader).to_json() for loader in self.loaders()],
            "tracked": self._tracked.state(),
        }

    def resume_loader(self, loader: DataLoader[Any]) -> None:
        """Hear of a loader that was just prepared: one that the loaded checkpoint knows goes on from there."""
        if not self._waiting:
            return
        number = next(index for index, known in enumerate(self.loaders()) if known is loader)
        position, passes, on_resume = self._waiting.pop(number, (None, False, None))
        if position is None:
            return
        problem = explain_no_resume(loader, position)
        if problem is not None:
            raise CheckpointError(problem)
        resume_loader(loader, position, passes=passes, on_resume=on_resume)

    def load(
        self, input_dir: str | os.PathLike[str] | None, *, strict: bool, skips_finished: bool = False
    ) -> LoadReport:
        """Put a checkpoint back; see `Accelerator.load_state`.

        With ``passes`` loaders pass the epochs that are over empty, and random numbers are put back once more when the
        first batch after that is asked for: what the code between these loops has drawn leaves no trace.
        """
        self.wait()
        where = self._resolved.config.checkpoint.dir if input_dir is None else input_dir
        if where is None:
            raise MisuseError(f"load_state() needs a folder: {_NO_FOLDER}")
        try:
            checkpoint = open_checkpoint(where, self._comm)
        except NoCheckpoint as error:
            if is_accelerate_folder(where):
                raise NoCheckpoint(f"{error}; a folder of accelerate is read by {_FOREIGN}") from None
            raise
        tree: dict[str, Any] = {}
        problem: str | None = None
        try:
            tree = checkpoint.read_tree()
        except CheckpointError as error:
            problem = str(error)
        self._agree(problem)
        models = list(self._stepper.bundle.models)
        for hook in list(self._load_hooks.values()):
            hook(models, checkpoint.url)
        bundle = replace(self._stepper.bundle, models=tuple(models))
        live = self._stepper.strategy.read_state(bundle, copied=False)
        state, problems = match_state(tree, live, bundle, self._registered)
        positions = [LoaderPosition.from_json(values) for values in tree.get("data", [])]
        self._waiting.clear()
        self._agree(format_mismatches(checkpoint.url, problems) if problems and strict else None)
        self._agree(self._resume_loaders(positions, skips_finished, tree, checkpoint))
        notes = [f"passed over: {reason}" for reason in checkpoint.skipped] + problems
        if not tree["precision"] and live["precision"]:
            state["precision"] = live["precision"]
            notes.append("the loss scale starts anew: the checkpoint was saved without fp16")
        strategy = self._stepper.strategy
        strategy.write_state(bundle, state if strategy.capabilities.shards_params else materialize(state))
        for item, values in zip(self._registered, tree["registered"], strict=False):
            item.load_state_dict(_owned(materialize(values)))
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

    def load_foreign(self, folder: str | os.PathLike[str], *, strict: bool) -> LoadReport:
        """Put a folder of ``accelerate`` in; see `Accelerator.load_state`."""
        self.wait()
        found = AccelerateState(os.fspath(folder))
        problem: str | None = None
        try:
            found = read_accelerate_folder(folder)
        except CheckpointError as error:
            problem = str(error)
        self._agree(problem)
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
        self._agree(format_mismatches(found.url, problems) if problems and strict else None)
        notes = [*problems, *found.unread]
        if not found.precision and live["precision"]:
            state["precision"] = live["precision"]
            notes.append("the loss scale starts anew: it was saved without fp16")
        if found.schedulers and len(found.random) > 1:
            notes.append(
                f"schedulers were counted by {len(found.random)} processes; accelerate may have moved them as many "
                "times a step, here it is once"
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
            notes.append(f"random numbers are those of now: {len(found.random)} processes saved theirs, {size} load")
        self._observer.on_checkpoint_loaded(found.step)
        return LoadReport(found.url, found.step, max(len(found.random), 1), size, tuple(notes))

    def loaders(self) -> list[DataLoader[Any]]:
        """Return the prepared loaders, in the order of preparation."""
        return [item for item in self._prepared() if isinstance(item, DataLoader)]

    def _resume_loaders(
        self, positions: list[LoaderPosition], passes: bool, tree: dict[str, Any], checkpoint: StoredCheckpoint
    ) -> str | None:
        """Let the loaders go on; those that are prepared later will when they are. Returns what does not fit."""
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
        self._waiting = {
            number: (position, passes, on_resume) for number, position in enumerate(positions) if number >= len(loaders)
        }
        return None

    def _agree(self, problem: str | None) -> None:
        """Raise on every rank what went wrong on one, so that none goes on alone."""
        for rank, text in enumerate(self._comm.all_gather_json(problem)):
            if text is not None:
                raise CheckpointError(f"rank {rank}: {text}" if rank else text)

    def _facts(self) -> CheckpointOrigin:
        return CheckpointOrigin(
            run=self._run,
            step=self._stepper.num_steps,
            world_size=self._comm.world.size,
            strategy=self._stepper.strategy.name,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            config=redacted(self._resolved.config.model_dump(mode="json")),
            versions={"accel_nb": version("accel_nb"), "torch": torch.__version__},
        )

    # --- random numbers ---

    def _random_state(self) -> dict[str, Any]:
        """Return every rank's generators as rows of one tensor each, and the seed that other worlds derive from."""
        rank, size = self._comm.world.rank, self._comm.world.size
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
        rank, size = self._comm.world.rank, self._comm.world.size
        saved: dict[str, StoredTensor] = tree["rng"]["states"]
        before = checkpoint.manifest.origin.world_size
        row = rank if before == size else 0
        rng.restore({name: _row(value, row).clone() for name, value in saved.items()}, self._device)
        self._stepper.has_rank_rng = tree["rng"]["apart"]
        if before == size or size == 1 or not self._stepper.has_rank_rng:
            return []
        if rank > 0:
            rng.set_seed(rng.derive_seed(tree["rng"]["seed"], "step", tree["progress"]["step"], "rank", rank))
        return [
            f"random numbers of ranks above 0 are derived anew from (seed, step, rank): {before} saved, {size} load"
        ]

    # --- the open accumulation window ---

    def _gradients(self) -> list[dict[str, Slice]]:
        """Return what an open window has summed up so far: each rank's own, as rows of one tensor.

        Of gradients that are sharded there is one row: their mean over ranks.
        """
        rank, size = self._comm.world.rank, self._comm.world.size
        parameters = [
            (index, name, value)
            for index, model in enumerate(self._stepper.bundle.models)
            for name, value in model.named_parameters()
            if value.requires_grad
        ]
        anywhere = any_rank_has_gradient(self._comm, [value for _, _, value in parameters])
        found: list[dict[str, Slice]] = [{} for _ in self._stepper.bundle.models]
        for (index, name, value), is_there in zip(parameters, anywhere, strict=True):
            if not is_there:
                continue
            held = sharded.local_part(value)
            gradient = torch.zeros_like(held) if value.grad is None else sharded.local_part(value.grad)
            if sharded.is_sharded(value):  # of the mean over ranks, which is one row, each holds a part
                start, num_rows, place = sharded.first_row(value), 1, 0
            else:
                start, num_rows, place = 0, size, rank
            offsets = (place, start, *(0 for _ in value.shape[1:])) if value.dim() else (place,)
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
        if held and self._stepper.strategy.capabilities.hides_gradients:
            held = 0
            notes.append(
                f"an open accumulation window was dropped: strategy {self._stepper.strategy.name!r} cannot take its "
                "gradients"
            )
        if held:
            for model, gradients in zip(self._stepper.bundle.models, tree["gradients"], strict=False):
                self._restore_gradients(model, gradients)
        self._stepper.resume_at(progress["step"], held)
        return notes

    def _restore_gradients(self, model: nn.Module, saved: dict[str, StoredTensor]) -> None:
        """Give each rank its own sum back; where there are more or fewer, rank 0 gets all, scaled to the same mean."""
        rank, size = self._comm.world.rank, self._comm.world.size
        for name, value in model.named_parameters():
            if name not in saved:
                continue
            num_rows = saved[name].shape[0]
            if sharded.is_sharded(value):
                gradient = sharded.own_part(value, saved[name].read().mean(0))
                value.grad = sharded.shard_like(value, gradient.to(value.device, value.dtype))
                continue
            if num_rows == size:
                gradient = _row(saved[name], rank).clone()
            elif rank == 0:
                gradient = saved[name].read().sum(0) * (size / num_rows)
            else:
                gradient = torch.zeros(value.shape, dtype=value.dtype)
            value.grad = gradient.to(value.device, value.dtype)


_FOREIGN = "load_state(PATH, layout='accelerate')"
_NO_FOLDER = (
    "give one, as in save_state('checkpoints/step_100'), or set checkpoint.dir (flag --checkpoint, or "
    "config={'checkpoint': {'dir': ...}}), which names checkpoints step_N by itself"
)


def _add(hooks: dict[int, Any], hook: Any) -> HookHandle:
    handle = HookHandle(hooks)
    hooks[id(handle)] = hook
    return handle


def _row(stored: StoredTensor, row: int) -> Tensor:
    """Return one row of a stored tensor, without reading the others."""
    rest = stored.shape[1:]
    return stored.read(Region((row, *(0 for _ in rest)), (1, *rest)))[0]


def _owned(tree: Any) -> Any:
    """Return a tree whose tensors are no views of a file: what keeps them may outlive it."""
    return map_state(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def _model_state(model: nn.Module, values: Any) -> dict[str, Any]:
    """Return a model's tensors and the versions of its modules; buffers are rank 0's, since each rank has its own."""
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return {
        "values": {
            name: FromRankZero(value) if name in buffers and isinstance(value, Tensor) else value
            for name, value in values.items()
        },
        "versions": {prefix: dict(facts) for prefix, facts in getattr(values, "_metadata", {}).items()},
    }
