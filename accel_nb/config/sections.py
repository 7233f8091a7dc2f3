"""The groups of options: one for each strategy, and those of data, checkpoints, number formats and monitoring."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from accel_nb.config.value_types import (
    MAX_SEED,
    MONTH_S,
    ModuleName,
    Name,
    PathText,
    Real,
    Switch,
    Whole,
    Workers,
    as_address,
    as_duration,
    as_url,
    read_names,
    read_parts,
    read_real,
    read_seconds,
    read_text,
    read_whole,
    without_duplicates,
)


def declare(default: Any, description: str, *, unit: str | None = None, **extra: Any) -> Any:
    """Declare an option; ``extra`` may hold ``flag``, ``metavar``, ``allowed``, ``scope`` and JSON Schema keywords.

    The scope ``cell`` is that of options which change nothing about the training.
    """
    return Field(default, description=description, json_schema_extra={"unit": unit, **extra})


class Section(BaseModel):
    """A frozen group of options; a name that is not declared is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, validate_default=False)


class SingleOptions(Section):
    """Options of the strategy for one process; it has none."""


class DdpOptions(Section):
    """Options of PyTorch's DistributedDataParallel, with PyTorch's own names and defaults."""

    find_unused_parameters: Switch = declare(
        False,
        "Look in every backward pass for parameters that took no part; slower. Switched on by itself when the first "
        "step finds such parameters; needed from the start only if later steps leave others out.",
    )
    bucket_cap_mb: Annotated[Annotated[Whole, Field(ge=1, le=65536)], BeforeValidator(read_whole)] = declare(
        25, "Size of the gradient buckets that are reduced together.", unit="MiB"
    )
    static_graph: Switch = declare(False, "Promise that every step uses the same parameters in the same order.")
    broadcast_buffers: Switch = declare(
        True, "Copy rank 0's buffers (such as batch-norm statistics) to every rank before each forward pass."
    )
    comm_hook: Literal["no", "fp16", "bf16", "power_sgd"] = declare(
        "no", "Compress gradients on their way between workers: to 16 bits, or to a product of low rank."
    )
    comm_wrapper: Literal["no", "fp16", "bf16"] = declare(
        "no", "Number format around the comm hook: what it sends is cast to it as well."
    )
    power_sgd_rank: Annotated[Annotated[Whole, Field(ge=1, le=65536)], BeforeValidator(read_whole)] = declare(
        1, "Rank of the matrices that PowerSGD sends: larger is more exact and more to send."
    )
    power_sgd_start: Annotated[Annotated[Whole, Field(ge=2, le=MAX_SEED)], BeforeValidator(read_whole)] = declare(
        1000, "First step in which PowerSGD compresses; until then gradients are averaged as they are.", unit="steps"
    )
    power_sgd_min_compression: Annotated[Annotated[Real, Field(gt=0)], BeforeValidator(read_real)] = declare(
        2.0, "Compress only tensors that PowerSGD makes smaller by at least this factor.", unit="times"
    )
    power_sgd_error_feedback: Switch = declare(
        True, "Add to each step's gradients what PowerSGD lost in the step before; takes a gradient's worth of memory."
    )
    power_sgd_warm_start: Switch = declare(True, "Start PowerSGD's search from the matrices of the step before.")
    power_sgd_seed: Annotated[Annotated[Whole, Field(ge=0, le=2**32 - 1)], BeforeValidator(read_whole)] = declare(
        0, "Seed of the matrices that PowerSGD starts from."
    )


class FsdpOptions(Section):
    """Options of PyTorch's fully_shard: each worker holds a part of the model."""

    wrap: Annotated[Literal["blocks", "size", "classes", "model"], BeforeValidator(read_text)] = declare(
        "blocks",
        "What is gathered, computed and let go of at a time: repeated blocks of the model, modules of min_params "
        "parameters, modules of the given classes, or the model as a whole.",
    )
    min_params: Annotated[Annotated[Whole, Field(ge=1, le=MAX_SEED)], BeforeValidator(read_whole)] = declare(
        1_000_000, "How many parameters a module has that is gathered by size.", unit="parameters"
    )
    classes: Annotated[tuple[Name, ...], BeforeValidator(read_names), AfterValidator(without_duplicates)] = declare(
        (),
        "Class names of the modules that are gathered at a time.",
        metavar="NAMES",
        allowed="class names, separated by commas",
    )
    reshard_after_forward: Switch = declare(
        True, "Let go of parameters between forward and backward, and gather them again: less memory, more traffic."
    )
    hybrid_shard_size: Annotated[Workers | None, BeforeValidator(read_whole)] = declare(
        None,
        "How many workers share one copy of the model, such as those of one machine; none given: all.",
        unit="workers",
    )
    cpu_offload: Switch = declare(False, "Keep parameters, gradients and optimizer state in host memory.")
    autocast: Switch = declare(
        False,
        "Choose the number format for each operation, as on one device; else bf16 and fp16 are gathered and computed "
        "in throughout, which is half the traffic. Either way weights are kept and stepped as they are.",
    )
    reduce_dtype: Literal["fp32", "compute"] = declare(
        "fp32", "What gradients of half precision are averaged in: float32, or the format of the computation."
    )
    float8_gather: Switch = declare(
        False,
        "Gather the weights of the layers that multiply in fp8 in float8, which is half the traffic of bf16; recipe "
        "tensorwise.",
    )
    average_unused: Switch = declare(
        False,
        "Count a parameter that took no part on a worker as a zero gradient there: needed when workers use different "
        "parameters in one step.",
    )
    weights: PathText = declare(
        None,
        "Safetensors that models built without memory (torch.device('meta'), init_empty_weights) are filled from: each "
        "worker reads its part only.",
        metavar="PATH",
        allowed="the path of a safetensors file, of an index of several, or of their folder, or none",
    )
    forward_methods: Annotated[tuple[Name, ...], BeforeValidator(read_names), AfterValidator(without_duplicates)] = (
        declare(
            (),
            "Methods other than forward that compute with the model's parameters, such as encode.",
            metavar="NAMES",
            allowed="names of methods, separated by commas",
        )
    )


class DeepspeedOptions(Section):
    """Options of DeepSpeed's ZeRO: each worker holds a part of the training's state."""

    zero_stage: Annotated[Literal[1, 2, 3], BeforeValidator(read_whole)] = declare(
        2,
        "What is divided among the workers: 1 optimizer state, 2 gradients too, 3 parameters too.",
        flag="zero-stage",
    )
    offload_optimizer: Annotated[Literal["no", "cpu"], BeforeValidator(read_text)] = declare(
        "no", "Keep optimizer state, and step, in host memory."
    )
    offload_parameters: Annotated[Literal["no", "cpu"], BeforeValidator(read_text)] = declare(
        "no", "Keep divided parameters in host memory; stage 3."
    )
    bucket_size: Annotated[Annotated[Whole, Field(ge=2, le=MAX_SEED)], BeforeValidator(read_whole)] = declare(
        500_000_000, "How much is averaged, or gathered, in one message; at most the model.", unit="elements"
    )
    prefetch_size: Annotated[Annotated[Whole, Field(ge=0, le=MAX_SEED)], BeforeValidator(read_whole)] = declare(
        50_000_000, "How much is gathered ahead of the module that needs it; stage 3.", unit="elements"
    )
    persistent_size: Annotated[Annotated[Whole, Field(ge=0, le=MAX_SEED)], BeforeValidator(read_whole)] = declare(
        100_000, "Parameters of at most this size stay whole on each worker between steps; stage 3.", unit="elements"
    )
    overlap_comm: Switch = declare(False, "Average gradients while others are computed; stages 2 and 3, on GPUs.")
    weights: PathText = declare(
        None,
        "Safetensors that models built without memory (torch.device('meta'), init_empty_weights) are filled from, each "
        "worker reading its part only; stage 3.",
        metavar="PATH",
        allowed="the path of a safetensors file, of an index of several, or of their folder, or none",
    )
    allow_untested_optimizer: Switch = declare(
        False,
        "Take an optimizer that is not known to treat each element of a parameter by itself, as it must: parameters "
        "are cut anywhere.",
    )


class XlaOptions(Section):
    """Options of training by PyTorch/XLA."""

    shard_params: Switch = declare(
        False,
        "Divide parameters, gradients and optimizer state among the chips of a worker as well, not the batch alone.",
    )


class AccumulationOptions(Section):
    """What becomes of accumulation windows; how many batches one has is the option ``accumulate``."""

    tail: Literal["step", "carry", "drop"] = declare(
        "step",
        "What a window becomes that the end of the loader cuts short: step takes an optimizer step of it, carry goes "
        "on with it in the next epoch, drop throws its gradients away.",
    )
    sync_each_batch: Switch = declare(
        False,
        "Average gradients over ranks after every batch instead of once a window: more traffic, less memory where "
        "gradients are sharded.",
    )


class AutocastOptions(Section):
    """Options of torch.autocast."""

    enabled: Switch = declare(True, "Compute in the run's precision; off leaves autocast to the cell.")
    cache_enabled: Switch = declare(True, "Keep the low precision copies of weights within one autocast region.")


class ScalerOptions(Section):
    """Options of the loss scaling of fp16, with PyTorch's own names and defaults."""

    init_scale: Annotated[Annotated[Real, Field(gt=0)], BeforeValidator(read_real)] = declare(
        65536.0, "What losses are multiplied by at first."
    )
    growth_factor: Annotated[Annotated[Real, Field(gt=1)], BeforeValidator(read_real)] = declare(
        2.0, "What the scale is multiplied by after a while without overflow."
    )
    backoff_factor: Annotated[Annotated[Real, Field(gt=0, lt=1)], BeforeValidator(read_real)] = declare(
        0.5, "What the scale is multiplied by when gradients overflow."
    )
    growth_interval: Annotated[Annotated[Whole, Field(ge=1, le=1_000_000_000)], BeforeValidator(read_whole)] = declare(
        2000, "How long a while is.", unit="steps"
    )
    enabled: Switch = declare(True, "Scale losses in fp16; off lets small gradients vanish.")


class Fp8Options(Section):
    """Options of 8-bit floating point (precision fp8), by torchao."""

    recipe: Annotated[Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"], BeforeValidator(read_text)] = declare(
        "tensorwise",
        "What shares a scale: a tensor, which is fastest, or each row, which is more exact; the last computes the "
        "gradients of weights in bf16.",
    )
    emulate: Switch = declare(
        False, "Round to float8 and multiply in float32, on hardware without float8: slow, to see how a model trains."
    )
    skip_modules: Annotated[
        tuple[ModuleName, ...] | None, BeforeValidator(read_parts), AfterValidator(without_duplicates)
    ] = declare(
        None,
        "Names, or parts of names between dots, of layers that stay in bf16; none given: the first and the last "
        "linear layer.",
        metavar="NAMES",
        allowed="names of modules such as head or blocks.0, separated by commas, or none",
    )
    trial_rows: Annotated[Annotated[Whole, Field(ge=0, le=1_000_000)], BeforeValidator(read_whole)] = declare(
        0,
        "Before training, time the layers in fp8 and in bf16 on this many rows (tokens of a batch), and say which is "
        "faster; 0: do not.",
        unit="rows",
    )


class GroupOptions(Section):
    """Options of the process group, where this process opens it itself (under torchrun)."""

    backend: Annotated[Literal["auto", "gloo", "nccl"], BeforeValidator(read_text)] = declare(
        "auto", "What carries messages between ranks; auto is nccl for CUDA devices and gloo for the rest."
    )
    timeout: Annotated[Annotated[Real, Field(gt=0, le=MONTH_S)], BeforeValidator(read_seconds)] = declare(
        1800.0,
        "How long a rank waits for the others before it gives up.",
        unit="seconds",
        metavar="SECONDS|10min",
        allowed="a number of seconds, or a duration such as 30s, 10min, 1.5h or 1d (up to 30d)",
    )


class CompileOptions(Section):
    """Options of torch.compile for prepared models."""

    backend: Annotated[Annotated[str, Field(strict=True, min_length=1, max_length=64)], BeforeValidator(read_text)] = (
        declare(
            "no",
            "Compile models with this backend, such as inductor; no compiles nothing.",
            metavar="BACKEND",
            allowed="no, inductor, or another backend that torch.compile knows",
        )
    )
    mode: Annotated[
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"], BeforeValidator(read_text)
    ] = declare("default", "How much time compiling may take for faster code.")
    fullgraph: Switch = declare(False, "Refuse models that cannot be compiled as one graph.")
    dynamic: Annotated[Literal["auto", "yes", "no"], BeforeValidator(read_text)] = declare(
        "auto", "Compile for shapes that vary; auto does so when it meets the second shape."
    )
    regional: Switch = declare(
        True, "Compile repeated blocks of a model, each kind once, instead of the whole: starts many times faster."
    )


class DataOptions(Section):
    """Options of how loaders are read."""

    dispatch_batches: Annotated[Switch | None, BeforeValidator(read_text)] = declare(
        None,
        "Let rank 0 alone read, and send each rank its share; none given: for streams (iterable datasets that cannot "
        "divide themselves) whose batches are each worker's. Otherwise each rank reads for itself.",
        metavar="true|false",
    )
    even_batches: Switch = declare(
        False,
        "Let every rank take equally many samples, and repeat some from the start of the epoch where they run short; "
        "else shares may differ by one sample, are weighted, and no sample is repeated.",
    )
    use_seedable_sampler: Switch = declare(
        False, "Shuffle in an order that depends on data_seed and the epoch only, not on the state of a generator."
    )
    data_seed: Annotated[Annotated[Whole, Field(ge=0, le=MAX_SEED)] | None, BeforeValidator(read_whole)] = declare(
        None, "Seed of use_seedable_sampler; none given: seed, else that of rank 0's generator.", metavar="S"
    )
    resume_stream: Annotated[Literal["refuse", "replay"], BeforeValidator(read_text)] = declare(
        "refuse",
        "What going on in the middle of an epoch does with a stream that has no state_dict to say where it was: refuse "
        "to load, or read what was trained on again and drop it.",
    )
    non_blocking: Annotated[Switch | None, BeforeValidator(read_text)] = declare(
        None,
        "Copy the next batch to a GPU while the present one is trained on; none given: where the loader pins memory "
        "and reads in processes of its own, since else the next batch is read ahead of its time in this process.",
        metavar="true|false",
    )


class StrategySections(Section):
    """One section for each strategy; the names of the fields are the names of the strategies."""

    single: SingleOptions = Field(default_factory=SingleOptions, description="One process, one device; no options.")
    ddp: DdpOptions = Field(
        default_factory=DdpOptions, description="PyTorch DistributedDataParallel: one model replica per rank."
    )
    fsdp: FsdpOptions = Field(
        default_factory=FsdpOptions, description="PyTorch fully_shard (FSDP2): a part of the model on each rank."
    )
    deepspeed: DeepspeedOptions = Field(
        default_factory=DeepspeedOptions, description="DeepSpeed ZeRO: a part of the training's state on each rank."
    )
    xla: XlaOptions = Field(
        default_factory=XlaOptions, description="PyTorch/XLA: each worker drives all chips that it sees."
    )


class CheckpointOptions(Section):
    """Where checkpoints go and how many stay."""

    dir: PathText = declare(
        None,
        "Folder or URL of the checkpoints; those that are saved without a name of their own are called step_N.",
        metavar="DIR",
        allowed="the path of a folder, a URL such as s3://bucket/run, or none",
        flag="checkpoint",
    )
    every: Annotated[
        Annotated[Whole, Field(ge=1, le=1_000_000_000)] | Annotated[str, Field(strict=True, max_length=32)] | None,
        BeforeValidator(read_whole),
        AfterValidator(as_duration),
    ] = declare(
        None,
        "Save a checkpoint each time so many optimizer steps, or so much time, has passed, in the background between "
        "two steps.",
        flag="every",
        metavar="N|10min",
        allowed="a whole number of steps, a duration such as 30s, 10min, 1.5h or 1d (up to 30d), or none",
    )
    resume: PathText = declare(
        None,
        "Go on from a checkpoint: auto takes the newest complete one of checkpoint.dir if there is one, a path that "
        "one. Loops over epochs that are finished pass empty.",
        flag="resume",
        metavar="auto|PATH",
        allowed="auto, the path or URL of a checkpoint or of a folder of checkpoints, or none",
    )
    total_limit: Annotated[Annotated[Whole, Field(ge=1, le=1_000_000)] | None, BeforeValidator(read_whole)] = declare(
        None,
        "Keep at most this many of a run's step_N; older ones are removed once a new one is complete. None given: all.",
        unit="checkpoints",
    )


class MetricsOptions(Section):
    """Where a monitoring system finds the numbers of a run; all off by default, made in the notebook's process."""

    port: Annotated[Annotated[Whole, Field(ge=0, le=65535)] | None, BeforeValidator(read_whole)] = declare(
        None,
        "Serve metrics for Prometheus at http://127.0.0.1:PORT/metrics, to this machine only; 0 takes a free port.",
        metavar="PORT",
        scope="cell",
    )
    textfile: PathText = declare(
        None,
        "Write metrics for the textfile collector of Prometheus' node exporter; a name that ends in .prom.",
        metavar="FILE",
        allowed="the path of a file, or none",
        scope="cell",
    )
    statsd: Annotated[
        Annotated[str, Field(strict=True, max_length=256)] | None,
        BeforeValidator(read_text),
        AfterValidator(as_address),
    ] = declare(
        None,
        "Send metrics to StatsD, or to Datadog's agent.",
        metavar="HOST:PORT",
        allowed="a host and a port, such as 127.0.0.1:8125, or none",
        scope="cell",
    )
    statsd_tags: Switch = declare(
        True, "Say ranks as Datadog's tags; off makes them parts of the names, as plain StatsD needs it.", scope="cell"
    )
    otlp: Annotated[
        Annotated[str, Field(strict=True, max_length=2048)] | None, BeforeValidator(read_text), AfterValidator(as_url)
    ] = declare(
        None,
        "Send metrics to a collector of OpenTelemetry, by OTLP over HTTP.",
        metavar="URL",
        allowed="a URL such as http://127.0.0.1:4318/v1/metrics, or none",
        scope="cell",
    )


class NotifyOptions(Section):
    """How a user is notified of the end of a long run."""

    url: Annotated[
        Annotated[str, Field(strict=True, max_length=2048)] | None, BeforeValidator(read_text), AfterValidator(as_url)
    ] = declare(
        None,
        "Post a JSON object to this URL when a run has ended; its text and content are what Slack, Mattermost and "
        "Discord show.",
        metavar="URL",
        allowed="a URL such as https://hooks.slack.com/services/..., or none",
        scope="cell",
    )
    command: Annotated[
        Annotated[str, Field(strict=True, min_length=1, max_length=4096)] | None, BeforeValidator(read_text)
    ] = declare(
        None,
        "Start this program when a run has ended: the message is its last argument, a JSON object its input. Not "
        "allowed in the metadata of a notebook.",
        metavar="COMMAND",
        allowed="a command line, or none",
        scope="cell",
        refused_layers=["notebook"],
    )
    after: Annotated[Annotated[Real, Field(ge=0, le=MONTH_S)], BeforeValidator(read_seconds)] = declare(
        60.0,
        "Notify of runs that took at least so long.",
        unit="seconds",
        metavar="SECONDS|10min",
        allowed="a number of seconds, or a duration such as 30s, 10min, 1.5h or 1d (up to 30d)",
        scope="cell",
    )
