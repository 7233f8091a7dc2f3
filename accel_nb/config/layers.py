"""Layers of options, and their merge into one frozen Config that records the origin of each value.

From weakest to strongest: default < file < environment < notebook < flags < code.
"""

import json
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, cast

from pydantic import ValidationError

from accel_nb.config.conflicts import ALTERNATIVES, find_conflicts, find_unused_options, rank_problems, world_problems
from accel_nb.config.message_text import did_you_mean, quoted
from accel_nb.config.schema import OPTIONS, PLANNED_VALUES, SCHEMA_VERSION, SECTIONS, Config
from accel_nb.config.yaml_documents import read_options
from accel_nb.errors import ConfigError

LAYER_NAMES = ("default", "file", "environment", "notebook", "flags", "code")
"""The kinds of layers, weakest first."""

ENVIRONMENT_PREFIX = "ACCEL_NB_"

_EMPTY: Mapping[str, str] = MappingProxyType({})
_REMEDIES = {
    "file": "correct or remove the line",
    "environment": "correct or unset the variable",
    "notebook": "correct it in the sidebar",
    "flags": "correct or remove the flag",
    "code": "correct the argument",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """Options from one source.

    ``values`` may be nested (``{"ddp": {"static_graph": True}}``) or dotted (``{"ddp.static_graph": True}``).
    ``source`` is the name of the source, such as ``"train.yaml"`` or ``"Accelerator(...)"``; ``places`` are positions
    in it by option, where known. ``problems`` were found while the layer was read; ``resolve`` reports them too.
    """

    name: str
    values: Mapping[str, Any]
    source: str
    places: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    problems: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in LAYER_NAMES:
            raise ValueError(f"a layer is one of {LAYER_NAMES}, not {self.name!r}")

    def origin(self, option: str) -> "Origin":
        """Return the origin of this layer's value of the option."""
        return Origin(self.name, self.places.get(option, self.source))


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a value: the kind of layer, and the position in its source."""

    layer: str
    source: str

    def __str__(self) -> str:
        if self.layer == "default":
            return "default"
        return f"{self.source} ({self.layer})"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of ``Resolved.explain()``."""

    option: str
    value: Any
    origin: Origin


@dataclass(frozen=True)
class Resolved:
    """The config of a run, the origin of each of its values, and notes about settings that have no effect.

    Derived values are cached, since successive cells mostly run with the same options.
    """

    config: Config
    origins: Mapping[str, Origin]
    notes: tuple[str, ...] = ()

    def explain(self) -> list[Row]:
        """Return option, value and origin of every option, in the order of the schema."""
        values = _dotted(self.config)
        return [Row(option, values[option], self.origins[option]) for option in OPTIONS]

    def table(self) -> str:
        """Return ``explain()`` and the notes as lines of text."""
        rows = [(row.option, quoted(_display_value(row.value)), str(row.origin)) for row in self.explain()]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{option:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for option, value, origin in rows]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    @property
    def given(self) -> dict[str, Any]:
        """The values that layers set, by dotted name; defaults are left out."""
        return {row.option: row.value for row in self.explain() if row.origin.layer != "default"}

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Layers that resolve to this config again, to which stronger layers can be added."""
        layers: list[Layer] = []
        given = self.given
        for name in LAYER_NAMES[1:]:
            places = {option: origin.source for option, origin in self.origins.items() if origin.layer == name}
            # The layer of a named file is kept even if it is empty, so that the file is not read again.
            is_named_file = name == "file" and self.config.config is not None
            if places or is_named_file:
                values = {option: value for option, value in given.items() if option in places}
                source = str(self.config.config) if is_named_file else next(iter(places.values()))
                layers.append(Layer(name, values, source, places))
        return tuple(layers)

    @cached_property
    def training_key(self) -> str:
        """A key of the options that change the training: equal for configs that differ in scope ``cell`` only."""
        return self.config.model_dump_json(
            exclude={name for name, option in OPTIONS.items() if not option.affects_training}
        )

    def check_world(self, size: int) -> None:
        """Raise ConfigError for options that do not fit a world of ``size`` workers: ranks, and the mesh."""
        self._raise_for(world_problems(self.config, size))

    def check_ranks(self, size: int) -> None:
        """Raise ConfigError if an option names a rank that does not exist in a world of ``size`` workers."""
        self._raise_for(rank_problems(self.config, size))

    def _raise_for(self, problems: Mapping[str, str]) -> None:
        if problems:
            raise ConfigError(
                [f"{option} from {self.origins[option]}: {message}" for option, message in problems.items()]
            )

    def to_json(self) -> str:
        """Return the JSON document that is sent to the workers."""
        return self._document

    @cached_property
    def _document(self) -> str:
        given = self.given
        values = self.config.model_dump(mode="json")
        return json.dumps(
            {
                "version": SCHEMA_VERSION,
                "config": nested({name: _leaf(values, name) for name in given}),
                "origins": {name: [self.origins[name].layer, self.origins[name].source] for name in given},
                "notes": list(self.notes),
            },
            allow_nan=False,
        )

    @classmethod
    def from_json(cls, text: str) -> "Resolved":
        """Return the `Resolved` of a document that ``to_json`` wrote; raises ConfigError for any other text."""
        try:
            document = json.loads(text)
            if document["version"] != SCHEMA_VERSION:
                raise ConfigError(
                    f"the config has version {quoted(document['version'])}; this accel_nb reads {SCHEMA_VERSION}"
                )
            origins = {str(name): Origin(str(layer), str(at)) for name, (layer, at) in document["origins"].items()}
            notes = tuple(str(note) for note in document["notes"])
            config = Config.model_validate(document["config"])
        except (ValidationError, json.JSONDecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError("the config document is damaged: Resolved.to_json() did not write it") from error
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError("the config document is damaged: its origins are not pairs") from error
        if not origins.keys() <= OPTIONS.keys() or any(origin.layer not in LAYER_NAMES for origin in origins.values()):
            raise ConfigError("the config document is damaged: its origins are not those of the schema's options")
        return cls(config, _all_origins(origins), notes)


_current: ContextVar[tuple[Layer, ...] | Resolved] = ContextVar("accel_nb_layers", default=())


def current_layers() -> tuple[Layer, ...]:
    """Return the cell's layers of options, which an Accelerator's arguments override; none outside of a cell."""
    found = _current.get()
    return found.layers if isinstance(found, Resolved) else found


def current_config() -> Resolved | None:
    """Return the cell's resolved options, if these were passed to `using_layers`; else None."""
    found = _current.get()
    return found if isinstance(found, Resolved) else None


@contextmanager
def using_layers(layers: Iterable[Layer] | Resolved) -> Generator[None, None, None]:
    """Make these the cell's layers of options inside of the ``with`` block."""
    token = _current.set(layers if isinstance(layers, Resolved) else tuple(layers))
    try:
        yield
    finally:
        _current.reset(token)


def without_overridden(layer: Layer, stronger: Iterable[Layer]) -> Layer:
    """Return a layer without the options that ``stronger`` layers of the same kind replace, alternatives included."""
    replaced = {name for other in stronger if other.name == layer.name for name in other.values}
    replaced |= {name for pair in ALTERNATIVES if replaced & set(pair) for name in pair}
    values = {name: value for name, value in layer.values.items() if name not in replaced}
    return Layer(layer.name, values, layer.source, layer.places, layer.problems)


def environment_layer(environ: Mapping[str, str]) -> Layer:
    """Return the layer of the variables named ``ACCEL_NB_...`` in ``environ``."""
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    problems: list[str] = []
    by_variable = {option.variable: name for name, option in OPTIONS.items()}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = by_variable.get(variable)
        if name is not None:
            values[name] = text
            places[name] = f"{variable}={quoted(text)}"
        else:
            hint = did_you_mean(variable, list(by_variable))
            problems.append(f"{variable} sets no option of accel_nb{hint}; correct or unset the variable")
    return Layer("environment", values, "the environment", places, tuple(problems))


def resolve(layers: Iterable[Layer] = (), *, read: Callable[[str], Layer] | None = None) -> Resolved:
    """Merge the layers and return the config with each value's origin.

    Layers are sorted by kind; of two layers of the same kind the later one is stronger. The value of the option
    ``config`` is the path of a file, which is read by ``read`` (by default ``read_file``) unless the file's layer is
    among the layers.

    Raises:
        ConfigError: with one line for each problem of any layer.
    """
    stack = sorted(layers, key=lambda layer: LAYER_NAMES.index(layer.name))
    problems: list[str] = []
    checked = [(layer, _check_values(layer, problems)) for layer in stack]
    checked = _add_file_layer(checked, problems, read)
    _check_code_against_flags(checked, problems)

    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    notes: list[str] = []
    for layer, given in checked:
        for option, value in given.items():
            values[option], origins[option] = value, layer.origin(option)
            notes += _drop_alternative(option, values, origins)

    config = Config.model_validate(nested(values))
    for conflict in find_conflicts(config):
        places = " and ".join(f"{option} from {origins[option]}" for option in conflict.options if option in origins)
        problems.append(f"{places}: {conflict.message}")
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    notes += [
        f"{option} from {origins[option]} has no effect: {reason}"
        for option, reason in find_unused_options(config, values).items()
    ]
    return Resolved(config, _all_origins(origins), tuple(notes))


def read_file(path: str | os.PathLike[str]) -> Layer:
    """Return the layer of a YAML file, with the line of each option.

    Raises:
        ConfigError: with one line for each problem, if the file cannot be read or an option is wrong.
    """
    values, places, problems = read_options(path)
    check_layer(Layer("file", values, os.fspath(path), places, problems))
    return Layer("file", values, os.fspath(path), places)


def check_layer(layer: Layer) -> None:
    """Raise ConfigError, with one line for each, for values of a layer that are wrong whatever other layers set.

    Combinations are not checked: an option that one needs may be set by another layer.
    """
    problems: list[str] = []
    _check_values(layer, problems)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def _add_file_layer(
    checked: list[tuple[Layer, dict[str, Any]]], problems: list[str], read: Callable[[str], Layer] | None
) -> list[tuple[Layer, dict[str, Any]]]:
    path = next((given["config"] for _, given in reversed(checked) if given.get("config") is not None), None)
    if path is None or any(layer.name == "file" and layer.source == path for layer, _ in checked):
        return checked
    try:
        layer = (read or read_file)(path)
    except ConfigError as error:
        problems += error.problems
        return checked
    given = _check_values(layer, problems)
    weaker = sum(LAYER_NAMES.index(other.name) <= LAYER_NAMES.index("file") for other, _ in checked)
    return [*checked[:weaker], (layer, given), *checked[weaker:]]


def _check_values(layer: Layer, problems: list[str]) -> dict[str, Any]:
    """Return the layer's valid values by dotted name, and add a line to ``problems`` for each invalid one."""
    problems += layer.problems
    given: dict[str, Any] = {}
    for name, value in _flatten(layer, problems).items():
        option = OPTIONS.get(name)
        if option is None:
            problems.append(unknown_option_message(name, layer))
        elif isinstance(value, str) and value in PLANNED_VALUES.get(name, ()):
            problems.append(f"{name}: {quoted(value)} from {layer.origin(name)} is not supported by this version")
        elif layer.name in option.extra.get("refused_layers", ()):
            problems.append(
                f"{name}: {layer.origin(name)} cannot set it, since a notebook may come from someone else; give it as "
                "a flag, in a variable or in a file of options"
            )
        elif name == "config" and layer.name == "file":
            problems.append(
                f"config: {layer.origin(name)} names a further file, but a file cannot include another; remove the line"
            )
        else:
            try:
                given[name] = _value(Config.model_validate(nested({name: value})), name)
            except (ValidationError, RecursionError):
                problems.append(
                    f"{name}: {quoted(value)} from {layer.origin(name)} is not allowed; "
                    f"give {option.allowed}; {_REMEDIES.get(layer.name, 'correct it')}"
                )
    return given


def unknown_option_message(name: str, layer: Layer) -> str:
    """Return the line about an option that does not exist."""
    flags = {option.flag.replace("-", "_"): dotted for dotted, option in OPTIONS.items()}
    text = name if name.isprintable() and len(name) <= 80 else quoted(name)
    return f"{text} is not an option ({layer.origin(name)}){did_you_mean(name, flags | {o: o for o in OPTIONS})}"


def _display_value(value: object) -> object:
    if isinstance(value, tuple):
        return ",".join(map(str, cast("tuple[object, ...]", value))) or None
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else value


def _flatten(layer: Layer, problems: list[str]) -> dict[str, Any]:
    """Return the layer's values by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in layer.values.items():
        if name not in SECTIONS:
            options: dict[Any, Any] = {name: value}
        elif isinstance(value, Mapping):
            options = {f"{name}.{leaf}": inner for leaf, inner in cast("Mapping[Any, Any]", value).items()}
        elif value is None:
            options = {}  # a line "ddp:" without options below it
        else:
            problems.append(
                f"{name}: {quoted(value)} from {layer.origin(name)} is not allowed; {name} is a group of options"
            )
            continue
        for option, inner in options.items():
            if not isinstance(option, str):
                problems.append(f"{quoted(option)} is not an option ({layer.source}); the names of options are text")
            elif option in flat:
                problems.append(f"{option} is set twice in {layer.source}, nested and dotted; remove one")
            else:
                flat[option] = inner
    return flat


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested dict of values with dotted names."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        section, _, leaf = name.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[leaf] = value
    return tree


def _dotted(config: Config) -> dict[str, Any]:
    return {name: _value(config, name) for name in OPTIONS}


def _value(config: Config, name: str) -> Any:
    section, _, leaf = name.rpartition(".")
    return getattr(getattr(config, section) if section else config, leaf)


def _leaf(tree: Mapping[str, Any], name: str) -> Any:
    section, _, leaf = name.rpartition(".")
    return (tree[section] if section else tree)[leaf]


def _all_origins(given: Mapping[str, Origin]) -> Mapping[str, Origin]:
    default = Origin("default", "default")
    return MappingProxyType({name: given.get(name, default) for name in OPTIONS})


def _drop_alternative(option: str, values: dict[str, Any], origins: dict[str, Origin]) -> list[str]:
    """Drop the alternative of an option if a weaker layer set it, and return a note; equal layers conflict."""
    for pair in ALTERNATIVES:
        if option not in pair or values[option] is None:
            continue
        other = pair[1 - pair.index(option)]
        weaker = other in origins and _strength(origins[other]) < _strength(origins[option])
        if weaker and values[other] is not None:
            note = f"{other} from {origins[other]} is ignored: {option} from {origins[option]} replaces it"
            del values[other], origins[other]
            return [note]
    return []


def _strength(origin: Origin) -> int:
    return min(LAYER_NAMES.index(origin.layer), LAYER_NAMES.index("flags"))  # code and flags must agree


def _check_code_against_flags(checked: list[tuple[Layer, dict[str, Any]]], problems: list[str]) -> None:
    last: dict[str, dict[str, tuple[Layer, Any]]] = {"flags": {}, "code": {}}
    for layer, given in checked:
        if layer.name in last:
            last[layer.name].update({option: (layer, value) for option, value in given.items()})
    for option, (code, value) in last["code"].items():
        flags, flag_value = last["flags"].get(option, (code, value))
        if value != flag_value:
            problems.append(
                f"{option}: {quoted(value)} from {code.origin(option)} and {quoted(flag_value)} from "
                f"{flags.origin(option)} disagree; remove one of the two"
            )
