"""Detection of the notebook platform, with its display mode and advice. Imports no torch; uses no network."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import psutil

from accel_nb.runtime.process.environment import get_variable, get_variables, notebook_variables
from accel_nb.runtime.process.hardware import count_tpu_chips

DisplayMode = Literal["widget", "core widget", "picture", "text"]
"""How a front end displays the panel: by anywidget, by ipywidgets alone, as a picture, or not at all."""


@dataclass(frozen=True, slots=True)
class PlatformSignals:
    """The data that detect platforms: variables, loaded modules, names of the notebook, folders, parent process."""

    variables: Mapping[str, str] = field(default_factory=dict)
    modules: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    home: str = ""
    parent: str = ""
    """Command line of the parent process."""
    has_path: Callable[[str], bool] = os.path.exists
    num_tpu_chips: int = 0
    """Number of TPU chips on the machine's PCI bus."""

    @property
    def has_kernel(self) -> bool:
        """Whether this process is a notebook's kernel."""
        return "ipykernel" in self.modules


@dataclass(frozen=True, slots=True)
class Platform:
    """A platform: how it is detected, the best display mode of the panel there, and advice for its users."""

    name: str
    title: str
    is_detected: Callable[[PlatformSignals], bool]
    display_mode: DisplayMode = "widget"
    advice: tuple[str, ...] = ()
    kept_folder: str | None = None
    """The folder whose files are kept after the session; None if all files are kept or it is unknown."""
    kept_bytes: int | None = None
    """The most bytes that the platform keeps of this folder."""
    keep_advice: str = ""
    """The code that creates ``kept_folder`` if it does not exist."""
    worker_variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of workers and ranks; those that the user has set take precedence."""


_RUNNERS = ("papermill", "nbconvert", "jupyter-execute")
_DISCONNECTS = "sessions end by themselves: --checkpoint DIR --every 10min --resume auto continues where they stopped"

PLATFORMS: tuple[Platform, ...] = (
    Platform(
        "kaggle",
        "Kaggle",
        lambda signals: "KAGGLE_KERNEL_RUN_TYPE" in signals.variables or signals.has_path("/kaggle/input"),
        display_mode="core widget",
        advice=(
            "choose GPU T4 x2, not P100, in the session options: recent builds of torch do not run on a P100",
            "a T4 has no bf16: use --precision fp16 or auto",
            "the two T4 have no peer-to-peer copies: workers run with NCCL_P2P_DISABLE=1, unless you set it",
            "a session ends after about 20 minutes without activity, and after 12 hours (9 with a TPU): Save Version "
            "runs the notebook without you",
            "the internet is off in competition reruns, and until it is switched on: install from attached datasets",
            _DISCONNECTS,
        ),
        kept_folder="/kaggle/working",
        kept_bytes=20 * 10**9,
        worker_variables={"NCCL_P2P_DISABLE": "1"},
    ),
    Platform(
        "colab",
        "Google Colab",
        lambda signals: "google.colab" in signals.modules or "COLAB_RELEASE_TAG" in signals.variables,
        advice=(
            "there is one GPU at most; a T4 has no bf16: use --precision fp16 or auto",
            "a session ends after about 90 minutes without activity, and after 12 hours at most",
            _DISCONNECTS,
        ),
        kept_folder="/content/drive/MyDrive",
        keep_advice="from google.colab import drive; drive.mount('/content/drive')",
    ),
    Platform(
        "deepnote",
        "Deepnote",
        lambda signals: signals.has_kernel and "DEEPNOTE_PROJECT_ID" in signals.variables,
        display_mode="picture",
        advice=("widgets are not available: the panel is a picture",),
    ),
    Platform(
        "paperspace",
        "Paperspace",
        lambda signals: "PAPERSPACE_NOTEBOOK_REPO_ID" in signals.variables,
        advice=("free notebooks end after six hours", _DISCONNECTS),
    ),
    Platform(
        "studiolab",
        "SageMaker Studio Lab",
        lambda signals: signals.home.rstrip("/") == "/home/studio-lab-user",
        display_mode="picture",
        advice=("the disk has 15 GB: keep few checkpoints (--checkpoint.total-limit 2)", _DISCONNECTS),
    ),
    Platform(
        "sagemaker",
        "SageMaker Studio",
        lambda signals: "SAGEMAKER_INTERNAL_IMAGE_URI" in signals.variables,
        advice=("the server's memory and devices are another machine's: rely on the cell's output, not the page",),
    ),
    Platform(
        "databricks",
        "Databricks",
        lambda signals: "DATABRICKS_RUNTIME_VERSION" in signals.variables,
        display_mode="picture",
        advice=("workers run on the driver only, with its devices",),
    ),
    Platform(
        "vscode",
        "VS Code",
        lambda signals: (
            signals.has_kernel and ("VSCODE_PID" in signals.variables or "__vsc_ipynb_file__" in signals.names)
        ),
        advice=("widgets are not saved with the notebook: the picture below them is",),
    ),
    Platform(
        "headless",
        "papermill or nbconvert",
        lambda signals: signals.has_kernel and any(word in signals.parent for word in _RUNNERS),
        advice=("no front end is connected: the panel's picture and the last lines stay in the notebook",),
    ),
    Platform("jupyter", "Jupyter", lambda signals: signals.has_kernel),
    Platform("script", "a script", lambda signals: True, display_mode="text"),
)
"""All platforms, in the order of detection: Kaggle's image also sets Colab's variables; VS Code's are inherited."""


_TPU_VARIABLES = "TPU_ACCELERATOR_TYPE", "PJRT_DEVICE"


def collect_signals() -> PlatformSignals:
    """Return the signals of this process."""
    main = sys.modules.get("__main__")
    try:
        parent = " ".join((psutil.Process().parent() or psutil.Process()).cmdline())
    except psutil.Error:  # the parent has ended, or belongs to another user
        parent = ""
    app = getattr(sys.modules.get("ipykernel.kernelapp"), "IPKernelApp", None)
    is_kernel = app is not None and app.initialized()  # scripts may import ipykernel too
    return PlatformSignals(
        variables=notebook_variables(),
        modules=frozenset(sys.modules) - (frozenset() if is_kernel else {"ipykernel"}),
        names=frozenset(vars(main)) if main is not None else frozenset(),
        home=os.path.expanduser("~"),
        parent=parent,
        num_tpu_chips=count_tpu_chips(),
    )


def detect_platform(signals: PlatformSignals | None = None) -> Platform:
    """Return the first platform that is detected, or ``script``."""
    here = signals or collect_signals()
    return next(platform for platform in PLATFORMS if platform.is_detected(here))


def find_notebook() -> str | None:
    """Return the path of the notebook of this kernel, as Jupyter's server or VS Code reports it; None elsewhere."""
    vscode_path = getattr(sys.modules.get("__main__"), "__vsc_ipynb_file__", None)
    return vscode_path if isinstance(vscode_path, str) else get_variable("JPY_SESSION_NAME", None)


def find_tpu(signals: PlatformSignals | None = None) -> str | None:
    """Return the type of this machine's TPU, ``TPU`` if the type is unknown, or None without a TPU.

    Images of TPU machines set a variable to the type. The chips are on the PCI bus; older drivers also list them as
    ``/dev/accel0``. ``COLAB_TPU_ADDR`` and ``TPU_NAME`` belong to an older design and are ignored.
    """
    here = signals or PlatformSignals(get_variables(*_TPU_VARIABLES), num_tpu_chips=count_tpu_chips())
    named, asked_for = map(here.variables.get, _TPU_VARIABLES)
    is_asked_for = (asked_for or "").upper() == "TPU"
    if named or is_asked_for or here.num_tpu_chips or here.has_path("/dev/accel0"):
        return named or "TPU"
    return None
