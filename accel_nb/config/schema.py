"""The schema: every option of accel_nb, declared once with type, limits, unit, help line and default.

Flags, environment variables, the YAML file, the sidebar's form, the TypeScript types and ``docs/options.md`` are all
derived from the models below and in ``sections``. To add an option, add a field; to add a strategy's options, add a
section to ``StrategySections``; then run ``python -m accel_nb.config.export``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_origin

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.fields import FieldInfo

from accel_nb.config.installed import STRATEGY_GROUP, installed_entry_points, with_installed_sections
from accel_nb.config.sections import (
    AccumulationOptions,
    AutocastOptions,
    CheckpointOptions,
    CompileOptions,
    DataOptions,
    Fp8Options,
    GroupOptions,
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
    Name,
    PathText,
    Rank,
    Ranks,
    Real,
    Switch,
    Whole,
    Workers,
    as_run_name,
    as_size,
    read_names,
    read_ranks,
    read_real,
    read_seconds,
    read_text,
    read_whole,
    without_duplicates,
)

SCHEMA_VERSION = 1

PLANNED_VALUES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # PyTorch's own fails in its first compressed step, up to 2.13 at least.
        "ddp.comm_hook": ("batched_power_sgd",),
        # Offloading to disk: DeepSpeed compiles its operator for it with libaio on the machine where it runs.
        "deepspeed.offload_optimizer": ("nvme",),
        "deepspeed.offload_parameters": ("nvme",),
    }
)
"""Values that this version refuses by name, with the option that will take them."""

STRATEGIES = ("auto", *StrategySections.model_fields)
"""What ``strategy`` may be, beside what other packages have installed."""


def _strategy(value: str) -> str:
    if value not in STRATEGIES and value not in installed_entry_points(STRATEGY_GROUP).names:
        raise ValueError("not a strategy")
    return value


class _Options(Section):
    """The options of a run that belong to no strategy."""

    checkpoint: CheckpointOptions = Field(
        default_factory=CheckpointOptions, description="Where checkpoints go and how many stay."
    )
    gpus: Annotated[Workers | Literal["all"] | None, BeforeValidator(read_whole)] = declare(
        None, "Run on this many GPUs, one worker each; none given: every visible one, else one CPU worker.", unit="GPUs"
    )
    cpus: Annotated[Annotated[int, Field(strict=True, ge=1, le=256)] | None, BeforeValidator(read_whole)] = declare(
        None, "Run on this many CPU workers instead of on accelerators.", unit="workers"
    )
    tpus: Annotated[Workers | Literal["all"] | None, BeforeValidator(read_whole)] = declare(
        None,
        "Run on the TPU, where one worker drives all chips: all, or as many as there are. None given: where there is "
        "a TPU and no GPU.",
        unit="chips",
    )
    precision: Literal["no", "fp16", "bf16", "fp8", "auto"] = declare(
        "no",
        "Number format of the forward and backward pass; auto takes the best of the others than fp8 that the device "
        "really has.",
    )
    strategy: Annotated[str, Field(strict=True), AfterValidator(_strategy)] = declare(
        "auto",
        "How the workers share the training. auto chooses by worker count and devices, and for models that could be "
        "too large by a forecast of the memory; where auto was asked for it is always made, and what cannot fit is "
        "refused.",
        enum=list(STRATEGIES),
    )
    memory: Annotated[
        Annotated[str, Field(strict=True, max_length=32)] | None, BeforeValidator(read_text), AfterValidator(as_size)
    ] = declare(
        None,
        "How much each device may hold, for the plan of strategy auto; none given: what is free on it.",
        metavar="SIZE",
        allowed="a size such as 80GiB (2^30 bytes) or 24GB (10^9), or none",
    )
    accumulate: Annotated[Annotated[Whole, Field(ge=1, le=1_000_000)], BeforeValidator(read_whole)] = declare(
        1, "Batches whose gradients are summed up before one optimizer step.", unit="batches"
    )
    accumulation: AccumulationOptions = Field(
        default_factory=AccumulationOptions, description="What becomes of accumulation windows."
    )
    schedule: Annotated[Literal["steps", "samples", "calls"], BeforeValidator(read_text)] = declare(
        "steps",
        "What a call of scheduler.step() advances: one optimizer step, as many as there are ranks (for schedules that "
        "were computed for one process), or one call whatever the optimizer does.",
    )
    autocast: AutocastOptions = Field(default_factory=AutocastOptions, description="Options of torch.autocast.")
    scaler: ScalerOptions = Field(default_factory=ScalerOptions, description="Loss scaling of fp16.")
    fp8: Fp8Options = Field(default_factory=Fp8Options, description="8-bit floating point.")
    activation_checkpointing: Switch = declare(
        False,
        "Compute the activations of repeated blocks again in the backward pass instead of keeping them: less memory, "
        "about a third more computing.",
    )
    compile: CompileOptions = Field(default_factory=CompileOptions, description="torch.compile for prepared models.")
    group: GroupOptions = Field(default_factory=GroupOptions, description="The process group under torchrun.")
    sentinels: Switch = declare(
        True,
        "Check the first optimizer step: that parameters moved, that ranks agree, that the learning rate is the "
        "planned one, and stop at a loss that is NaN.",
    )
    clip: Annotated[Annotated[Real, Field(gt=0)] | None, BeforeValidator(read_real)] = declare(
        None, "Clip the gradients to this total norm before each optimizer step.", unit="norm", metavar="NORM"
    )
    seed: Annotated[Annotated[Whole, Field(ge=0, le=MAX_SEED)] | None, BeforeValidator(read_whole)] = declare(
        None, "Seed of Python, NumPy and PyTorch in every worker.", metavar="S"
    )
    batch: Annotated[Literal["per-worker", "global"] | None, BeforeValidator(read_text)] = declare(
        None,
        "What the loader's batch size means: each worker's batch, or the batch of all workers together; none given: "
        "global for a plain cell, per-worker for a cell that uses the accelerator.",
    )
    divide: Annotated[Literal["auto", "data", "model", "none"], BeforeValidator(read_text)] = declare(
        "auto",
        "How a plain cell divides a batch among the workers. model: each computes some rows in the models, and the "
        "cell sees whole batches, outputs and losses. data: each reads and computes its share, for losses that are "
        "sums or means over samples. auto: model, and data where the loss is proven to allow it and it is cheaper. "
        "none: every worker computes everything.",
    )
    name: Annotated[
        Annotated[str, Field(strict=True, min_length=1, max_length=64)] | None,
        BeforeValidator(read_text),
        AfterValidator(as_run_name),
    ] = declare(
        None,
        "Name of the run, as trackers and the sidebar show it.",
        metavar="RUN",
        allowed="1 to 64 printable characters without / and \\, or none",
        scope="cell",
    )
    prepare: Switch = declare(
        True, "Prepare the models, optimizers and loaders of a plain cell automatically.", scope="cell"
    )
    pull: Annotated[tuple[Name, ...], BeforeValidator(read_names), AfterValidator(without_duplicates)] = declare(
        (),
        "Names to bring back to the notebook although they are large.",
        metavar="NAMES",
        allowed="Python names, separated by commas",
        scope="cell",
    )
    bring_back: Switch = declare(
        True,
        "Bring the names that the cell binds and the weights that it trains back to the notebook.",
        flag="return",
        scope="cell",
    )
    show_ranks: Annotated[
        Literal["all"] | tuple[Rank, ...], BeforeValidator(read_ranks), AfterValidator(without_duplicates)
    ] = declare(
        (),
        "Ranks whose output is shown unfolded besides rank 0's; none given: rank 0 only.",
        unit="ranks",
        scope="cell",
    )
    ranks: Annotated[Ranks | None, BeforeValidator(read_ranks), AfterValidator(without_duplicates)] = declare(
        None, "Run the cell on these ranks only; none given: on all.", unit="ranks", scope="cell"
    )
    static: Switch = declare(False, "Draw the panel as a picture instead of a live widget.", scope="cell")
    panel: Switch = declare(True, "Show the panel with loss and memory below the cell.", scope="cell")
    background: Switch = declare(
        False,
        "Return at once, while the cell runs; what it binds and trains comes back when it has ended.",
        scope="cell",
    )
    dry_run: Switch = declare(False, "Print the plan and start nothing.", scope="cell")
    timeout: Annotated[Annotated[Real, Field(gt=0, le=MONTH_S)] | None, BeforeValidator(read_seconds)] = declare(
        None,
        "Stop the cell when it runs longer than this.",
        unit="seconds",
        metavar="SECONDS|10min",
        allowed="a number of seconds, a duration such as 30s, 10min, 1.5h or 1d (up to 30d), or none",
        scope="cell",
    )
    max_restarts: Annotated[Annotated[Whole, Field(ge=0, le=1000)], BeforeValidator(read_whole)] = declare(
        0,
        "Run a cell whose worker dies or raises again, so often at most, on fresh workers: from the newest checkpoint "
        "if there is a folder for them, else from the start.",
        unit="restarts",
        metavar="N",
        scope="cell",
    )
    debug: Switch = declare(
        False,
        "Before each exchange between workers make sure that all of them make the same one, with tensors that fit, and "
        "name the worker that differs; slower.",
    )
    config: PathText = declare(
        None,
        "YAML file with options; everything else overrides it.",
        metavar="FILE",
        allowed="the path of a YAML file, or none",
        scope="cell",
    )
    data: DataOptions = Field(default_factory=DataOptions, description="How loaders are read.")
    metrics: MetricsOptions = Field(
        default_factory=MetricsOptions, description="Numbers of a run for monitoring systems."
    )
    notify: NotifyOptions = Field(default_factory=NotifyOptions, description="Notifications of the end of long runs.")


if TYPE_CHECKING:
    _Strategies = StrategySections
else:
    _Strategies = with_installed_sections(StrategySections, _Options.model_fields)

STRATEGY_SECTIONS = tuple(_Strategies.model_fields)
"""The names of the sections of strategies, those that other packages have installed included."""


class Config(_Options, _Strategies):
    """All options of a run, each within its own limits.

    ``resolve`` builds it from layers and checks what must hold between options; a Config that is built by hand is
    checked field by field only.
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
        """Facts that the type does not hold: unit, flag, metavar, allowed, scope."""
        extra = self.field.json_schema_extra
        return cast("dict[str, Any]", extra) if isinstance(extra, dict) else {}

    @property
    def flag(self) -> str:
        """The flag's name without dashes in front."""
        return self.extra.get("flag", self.name.replace("_", "-"))

    @property
    def variable(self) -> str:
        """The environment variable that sets the option."""
        return "ACCEL_NB_" + self.name.upper().replace(".", "__")

    @property
    def is_of_training(self) -> bool:
        """Whether the option changes how a cell trains, not only how it is run and shown."""
        return self.extra.get("scope") != "cell"

    @property
    def default(self) -> Any:
        """The value if no layer sets one."""
        return self.field.default

    @property
    def is_switch(self) -> bool:
        """Whether the option is on or off."""
        return self.field.annotation is bool

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        return _in_words(self._json_schema)

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
    """Whether the field is a section of options rather than an option."""
    kind = field.annotation
    # Under Python 3.10 list[int] counts as a type too, of which issubclass raises.
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


def _in_words(node: Mapping[str, Any]) -> str:
    if "allowed" in node:
        return node["allowed"]
    if "anyOf" in node:
        return _either([_in_words(part) for part in node["anyOf"]])
    if "enum" in node:
        return _either([str(choice) for choice in node["enum"]])
    if "const" in node:
        return str(node["const"])
    kind = node.get("type")
    if kind == "array":
        return f"a comma list in which each is {_in_words(node['items'])}"
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
