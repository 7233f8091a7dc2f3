"""The schema: every option of accel_nb, declared once with type, limits, unit, help text and default.

Flags, environment variables, the YAML file, the sidebar's form, the TypeScript types and ``docs/options.md`` are
derived from the models in this module and in ``sections``. To add an option, add a field; to add a strategy's options,
add a section to ``StrategySections``; then run ``python -m accel_nb.config.export``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_origin

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.fields import FieldInfo

from accel_nb.config.engine_section import EngineOptions
from accel_nb.config.installed import STRATEGY_GROUP, installed_entry_points, with_installed_sections
from accel_nb.config.sections import (
    AccumulationOptions,
    AutocastOptions,
    CheckpointOptions,
    CompileOptions,
    DataOptions,
    Fp8Options,
    GroupOptions,
    MeshOptions,
    MetricsOptions,
    NotifyOptions,
    ScalerOptions,
    Section,
    StrategySections,
    declare,
)
from accel_nb.config.value_types import (
    MAX_SEED,
    MONTH_S,
    Float,
    Int,
    Name,
    PathText,
    Rank,
    Ranks,
    Switch,
    Workers,
    as_run_name,
    as_size,
    read_float,
    read_int,
    read_names,
    read_ranks,
    read_seconds,
    read_text,
    without_duplicates,
)

SCHEMA_VERSION = 1

PLANNED_VALUES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # PyTorch's implementation fails in its first compressed step, up to version 2.13 at least.
        "ddp.comm_hook": ("batched_power_sgd",),
        # Offloading to disk: DeepSpeed compiles the operator with libaio on the machine where it runs.
        "deepspeed.offload_optimizer": ("nvme",),
        "deepspeed.offload_parameters": ("nvme",),
    }
)
"""Values, by option, that this version rejects with a message and a later version will support."""

STRATEGIES = ("auto", *StrategySections.model_fields)
"""The values of ``strategy``, without the strategies of other packages."""

MODEL_PARALLEL_STRATEGIES = ("auto", "ddp", "fsdp")
"""The values of ``strategy`` that can be combined with ``mesh.tp``, ``mesh.cp``, ``mesh.pp`` and ``mesh.ep``."""


def _strategy(value: str) -> str:
    if value not in STRATEGIES and value not in installed_entry_points(STRATEGY_GROUP).names:
        raise ValueError("not a strategy")
    return value


class _Options(Section):
    """The options of a run, without the sections of strategies."""

    checkpoint: CheckpointOptions = Field(
        default_factory=CheckpointOptions, description="Where checkpoints are saved, and how many are kept."
    )
    gpus: Annotated[Workers | Literal["all"] | None, BeforeValidator(read_int)] = declare(
        None,
        "Run on this many GPUs, one worker each; if not set, on every visible one, else one CPU worker.",
        unit="GPUs",
    )
    cpus: Annotated[Annotated[int, Field(strict=True, ge=1, le=256)] | None, BeforeValidator(read_int)] = declare(
        None, "Run on this many CPU workers instead of on accelerators.", unit="workers"
    )
    tpus: Annotated[Workers | Literal["all"] | None, BeforeValidator(read_int)] = declare(
        None,
        "Run on the TPU, where one worker drives all chips: all, or the number of chips. If not set, the TPU is "
        "used if there is no GPU.",
        unit="chips",
    )
    precision: Literal["no", "fp16", "bf16", "fp8", "auto"] = declare(
        "no",
        "Number format of the forward and backward pass; auto is the best of bf16, fp16 and no that the device "
        "supports in hardware.",
    )
    strategy: Annotated[str, Field(strict=True), AfterValidator(_strategy)] = declare(
        "auto",
        "How the workers train a model together. auto chooses by worker count and devices, and for models that could "
        "be too large by a memory forecast; if auto is set explicitly, the forecast is always made, and a model that "
        "cannot fit is an error.",
        enum=list(STRATEGIES),
    )
    memory: Annotated[
        Annotated[str, Field(strict=True, max_length=32)] | None, BeforeValidator(read_text), AfterValidator(as_size)
    ] = declare(
        None,
        "Memory limit of each device for the plan of strategy auto; if not set, its free memory.",
        metavar="SIZE",
        allowed="a size such as 80GiB (2^30 bytes) or 24GB (10^9), or none",
    )
    accumulate: Annotated[Annotated[Int, Field(ge=1, le=1_000_000)], BeforeValidator(read_int)] = declare(
        1, "Number of batches whose gradients are accumulated before an optimizer step.", unit="batches"
    )
    accumulation: AccumulationOptions = Field(
        default_factory=AccumulationOptions, description="Handling of accumulation windows."
    )
    schedule: Annotated[Literal["steps", "samples", "calls"], BeforeValidator(read_text)] = declare(
        "steps",
        "How far a call of scheduler.step() advances the schedule: by one for each optimizer step, by the number of "
        "ranks (for schedules that were computed for one process), or by one for each call.",
    )
    autocast: AutocastOptions = Field(default_factory=AutocastOptions, description="Options of torch.autocast.")
    scaler: ScalerOptions = Field(default_factory=ScalerOptions, description="Loss scaling of fp16.")
    fp8: Fp8Options = Field(default_factory=Fp8Options, description="8-bit floating point.")
    activation_checkpointing: Switch = declare(
        False,
        "Recompute the activations of repeated blocks in the backward pass instead of storing them: less memory, about "
        "a third more computation.",
    )
    compile: CompileOptions = Field(default_factory=CompileOptions, description="torch.compile for prepared models.")
    group: GroupOptions = Field(default_factory=GroupOptions, description="The process group under torchrun.")
    sentinels: Switch = declare(
        True,
        "Check the first optimizer step: that parameters changed, that they are equal on all ranks, and that the "
        "learning rate is the scheduled one. Stop at a loss that is NaN.",
    )
    clip: Annotated[Annotated[Float, Field(gt=0)] | None, BeforeValidator(read_float)] = declare(
        None, "Clip the gradients to this total norm before each optimizer step.", unit="norm", metavar="NORM"
    )
    seed: Annotated[Annotated[Int, Field(ge=0, le=MAX_SEED)] | None, BeforeValidator(read_int)] = declare(
        None, "Seed of Python, NumPy and PyTorch in every worker.", metavar="S"
    )
    batch: Annotated[Literal["per-worker", "global"] | None, BeforeValidator(read_text)] = declare(
        None,
        "Meaning of the loader's batch size: the batch of each worker, or of all workers together. If not set: global "
        "in a plain cell, per-worker in a cell that uses the accelerator.",
    )
    divide: Literal["auto", "data", "model", "none"] = declare(
        "auto",
        "How the batches of a plain cell are divided among the workers. model: each worker computes some rows in the "
        "models, and the cell has whole batches, outputs and losses. data: each worker reads and computes its share, "
        "for losses that are sums or means over samples. auto: data in a cell that reads its rank, else model. none: "
        "every worker computes everything.",
    )
    name: Annotated[
        Annotated[str, Field(strict=True, min_length=1, max_length=64)] | None,
        BeforeValidator(read_text),
        AfterValidator(as_run_name),
    ] = declare(
        None,
        "Name of the run in trackers and in the sidebar.",
        metavar="RUN",
        allowed="1 to 64 printable characters without / and \\, or none",
        scope="cell",
    )
    prepare: Switch = declare(
        True, "Prepare the models, optimizers and loaders of a plain cell automatically.", scope="cell"
    )
    pull: Annotated[tuple[Name, ...], BeforeValidator(read_names), AfterValidator(without_duplicates)] = declare(
        (),
        "Names to return to the notebook although their values are large.",
        metavar="NAMES",
        allowed="Python names, separated by commas",
        scope="cell",
    )
    bring_back: Switch = declare(
        True,
        "Return the names that the cell binds and the weights that it trains to the notebook.",
        flag="return",
        scope="cell",
    )
    show_ranks: Annotated[
        Literal["all"] | tuple[Rank, ...], BeforeValidator(read_ranks), AfterValidator(without_duplicates)
    ] = declare(
        (),
        "Ranks whose output is shown expanded, in addition to rank 0; if not set, rank 0 only.",
        unit="ranks",
        scope="cell",
    )
    ranks: Annotated[Ranks | None, BeforeValidator(read_ranks), AfterValidator(without_duplicates)] = declare(
        None, "Run the cell on these ranks only; if not set, on all.", unit="ranks", scope="cell"
    )
    static: Switch = declare(False, "Draw the panel as a picture instead of a live widget.", scope="cell")
    panel: Switch = declare(True, "Show the panel with loss and memory below the cell.", scope="cell")
    background: Switch = declare(
        False,
        "Run the cell in the background; the names that it binds and trains are returned when it has ended.",
        scope="cell",
    )
    dry_run: Switch = declare(False, "Print the plan and start nothing.", scope="cell")
    timeout: Annotated[Annotated[Float, Field(gt=0, le=MONTH_S)] | None, BeforeValidator(read_seconds)] = declare(
        None,
        "Stop the cell when it runs longer than this.",
        unit="seconds",
        metavar="SECONDS|10min",
        allowed="a number of seconds, a duration such as 30s, 10min, 1.5h or 1d (up to 30d), or none",
        scope="cell",
    )
    max_restarts: Annotated[Annotated[Int, Field(ge=0, le=1000)], BeforeValidator(read_int)] = declare(
        0,
        "If a worker dies or raises, run the cell again on new workers, at most this many times: from the newest "
        "checkpoint if there is a checkpoint folder, else from the start.",
        unit="restarts",
        metavar="N",
        scope="cell",
    )
    debug: Switch = declare(
        False,
        "Before each collective, check that all workers call the same one with matching tensors, and report the worker "
        "that differs; slower.",
    )
    config: PathText = declare(
        None,
        "YAML file with options; environment, notebook, flags and code override it.",
        metavar="FILE",
        allowed="the path of a YAML file, or none",
        scope="cell",
    )
    engine: EngineOptions = Field(default_factory=EngineOptions, description="Where workers run.")
    mesh: MeshOptions = Field(default_factory=MeshOptions, description="Dimensions in which the workers are arranged.")
    data: DataOptions = Field(default_factory=DataOptions, description="How batches are loaded.")
    metrics: MetricsOptions = Field(
        default_factory=MetricsOptions, description="Metrics of a run for monitoring systems."
    )
    notify: NotifyOptions = Field(default_factory=NotifyOptions, description="Notifications of the end of long runs.")


if TYPE_CHECKING:
    _Strategies = StrategySections
else:
    _Strategies = with_installed_sections(StrategySections, _Options.model_fields)

STRATEGY_SECTIONS = tuple(_Strategies.model_fields)
"""The names of the sections of strategies, including those of other packages."""


class Config(_Options, _Strategies):
    """All options of a run.

    ``resolve`` builds a config from layers and checks the rules between options; the constructor checks each field
    separately.
    """


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the schema: its dotted name and its field."""

    name: str
    field: FieldInfo

    @property
    def section(self) -> str | None:
        """The section of the option, such as a strategy's; None at the root."""
        return self.name.rpartition(".")[0] or None

    @property
    def extra(self) -> Mapping[str, Any]:
        """Properties that the type does not contain: unit, flag, metavar, allowed, scope."""
        extra = self.field.json_schema_extra
        return cast("dict[str, Any]", extra) if isinstance(extra, dict) else {}

    @property
    def flag(self) -> str:
        """The flag's name without its leading dashes."""
        return self.extra.get("flag", self.name.replace("_", "-"))

    @property
    def variable(self) -> str:
        """The environment variable that sets the option."""
        return "ACCEL_NB_" + self.name.upper().replace(".", "__")

    @property
    def affects_training(self) -> bool:
        """Whether the option changes the training, and not only how a cell is run and displayed."""
        return self.extra.get("scope") != "cell"

    @property
    def default(self) -> Any:
        """The value if no layer sets the option."""
        return self.field.default

    @property
    def is_switch(self) -> bool:
        """Whether the option is on or off."""
        return self.field.annotation is bool

    @property
    def allowed(self) -> str:
        """A description of the allowed values."""
        return _describe_values(self._json_schema)

    @property
    def metavar(self) -> str:
        """The placeholder of the value in the usage text; empty for a switch."""
        return "" if self.is_switch else self.extra.get("metavar") or _metavar(self._json_schema)

    @property
    def _json_schema(self) -> Mapping[str, Any]:
        schema = json_schema()
        section, _, leaf = self.name.rpartition(".")
        if section:
            schema = schema["$defs"][schema["properties"][section]["$ref"].rpartition("/")[2]]
        return schema["properties"][leaf]


def _leaves(model: type[Section], prefix: str = "") -> dict[str, Option]:
    leaves: dict[str, Option] = {}
    sections: dict[str, Option] = {}
    for name, field in model.model_fields.items():
        if is_section(field):
            sections.update(_leaves(field.annotation, f"{prefix}{name}."))  # pyright: ignore[reportArgumentType]
        else:
            leaves[prefix + name] = Option(prefix + name, field)
    return leaves | sections


def is_section(field: FieldInfo) -> bool:
    """Return whether the field is a section of options rather than an option."""
    kind = field.annotation
    # In Python 3.10 list[int] is an instance of type, and issubclass raises for it.
    return isinstance(kind, type) and get_origin(kind) is None and issubclass(kind, Section)


OPTIONS: Mapping[str, Option] = MappingProxyType(_leaves(Config))
"""Every option by its dotted name, root options first."""

SECTIONS = tuple(name for name, field in Config.model_fields.items() if is_section(field))
"""The names of the groups of options."""


@cache
def json_schema() -> Mapping[str, Any]:
    """Return the JSON Schema (draft 2020-12) of all options, with units."""
    schema = Config.model_json_schema()
    return MappingProxyType({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})


def _describe_values(node: Mapping[str, Any]) -> str:
    if "allowed" in node:
        return node["allowed"]
    if "anyOf" in node:
        return _either([_describe_values(part) for part in node["anyOf"]])
    if "enum" in node:
        return _either([str(choice) for choice in node["enum"]])
    if "const" in node:
        return str(node["const"])
    kind = node.get("type")
    if kind == "array":
        return f"a comma-separated list, each item {_describe_values(node['items'])}"
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + _limits(node)
    return {"boolean": "true or false", "null": "none"}.get(str(kind), "text")


def _either(parts: list[str]) -> str:
    return f"{', '.join(parts[:-1])} or {parts[-1]}" if len(parts) > 1 else parts[0]


def _limits(node: Mapping[str, Any]) -> str:
    above, low, below, high = (node.get(key) for key in ("exclusiveMinimum", "minimum", "exclusiveMaximum", "maximum"))
    if node.get("type") == "integer":
        low = above + 1 if above is not None else low
        high = below - 1 if below is not None else high
        return f" from {low} to {high}"
    parts = [f" {word} {limit}" for word, limit in (("above", above), ("up to", high)) if limit is not None]
    return " and".join(parts)


def _metavar(node: Mapping[str, Any]) -> str:
    parts = [part for part in node.get("anyOf", [node]) if part.get("type") != "null"]
    if any("enum" in part or "const" in part for part in parts) or len(parts) > 1:
        return "|".join(_metavar_of(part) for part in parts)
    return _metavar_of(parts[0])


def _metavar_of(part: Mapping[str, Any]) -> str:
    if "enum" in part:
        return "|".join(map(str, part["enum"]))
    if "const" in part:
        return str(part["const"])
    return {"integer": "N", "number": "X", "array": "LIST"}.get(str(part.get("type")), "TEXT")
