"""Reads what `jaxpar tune` found to be the fastest, for `mode="auto"`."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import jax

from jaxpar.arguments.calls import naming, readable, type_error, value_error
from jaxpar.arguments.files import write_text
from jaxpar.arguments.lazy_names import open_types
from jaxpar.arguments.optional_packages import installed
from jaxpar.choose.sites import AUTO, Asked, using
from jaxpar.choose.trying import is_trying
from jaxpar.platforms.async_options import traced_options

if TYPE_CHECKING:
    TuningLike: TypeAlias = "str | Path | Tuning"
else:
    globals().update(open_types(__name__))


@readable
@dataclass(frozen=True)
class Tuning:
    """The fastest modes found for a program, and its conditions.

    Attributes:
      name: the file's name.
      command: the command that writes the file again.
      versions: those of the packages on which programs depend.
      device_kind: the `device_kind` of the devices.
      mesh: axes and sizes.
      compiler_options: the program's options.
      sites: for each call site and part (forward, backward, row chunks, dispatch), the fastest
        choice; `"auto"` if nothing was faster.
      clock: `"predicted"`, or `"measured"`.
      milliseconds: the program's times, `"auto"` without and `"tuned"` with these choices.
      tried: for readers, the program's time with each trial, or why there is none.

    Example:
      >>> tuning = Tuning("by hand", "-", {}, "TPU v6 lite", {"tp": 4}, {}, {})
      >>> tuning.device_kind, tuning.mesh
      ('TPU v6 lite', {'tp': 4})
    """

    name: str
    command: str
    versions: Mapping[str, str]
    device_kind: str
    mesh: Mapping[str, int]
    compiler_options: Mapping[str, Any]
    sites: Mapping[str, Mapping[str, str]]
    clock: str = ""
    milliseconds: Mapping[str, float] = field(default_factory=dict[str, float])
    tried: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __hash__(self) -> int:
        return self._hash

    @staticmethod
    def read(path: str | Path) -> Tuning:
        """Reads a file that `write` wrote, or raises a `ValueError` with the reason."""
        from jaxpar.arguments.local_paths import local_path

        with naming("tuned"):
            local_path("path", path)
            again = f"write it: jaxpar tune module:function -o {path}"
            try:
                record = json.loads(Path(path).read_text())
            except FileNotFoundError:
                raise value_error(f"there is no file {path}; {again}") from None
            except OSError as reason:
                raise value_error(f"{path} cannot be read: {reason.strerror}; {again}") from None
            except (ValueError, RecursionError) as reason:
                raise value_error(f"{path} is no JSON: {reason}; {again}") from None
            _check_record(path, record, again)
            return Tuning(str(path), **record)

    def write(self, path: str | Path) -> None:
        """Writes a JSON file, which you may edit."""
        write_text(path, self._text() + "\n")

    def decide(self, asked: Asked) -> str:
        way = self.way(asked.site, asked.part)
        if way != AUTO and way not in asked.ways:
            known = ", ".join((*asked.ways, AUTO))
            raise value_error(
                f"{self.name} has {way!r} for the {asked.part} of {asked.site!r}; write one of "
                f"{known}"
            )
        return way

    def way(self, site: str, part: str) -> str:
        # Raises if the program is traced for something else, or the site is unknown.
        self._check_traced()
        chosen = self.sites.get(site, {}).get(part)
        if chosen is None:
            nearest = get_close_matches(site, self.sites, 1, 0.0)
            has = f"the nearest that it has is {nearest[0]!r}" if nearest else "it has none at all"
            raise self._stale(f"has nothing for the {part} of {site!r}; {has}")
        return chosen

    def check_versions(self) -> None:
        # Raises if installed versions differ from the file's.
        for package, wanted in self.versions.items():
            here = versions(package).get(package, "not installed")
            if here != wanted:
                raise self._stale(f"is of {package} {wanted}, here it is {here}")

    def _check_traced(self) -> None:
        mesh = jax.sharding.get_abstract_mesh()
        device = mesh.abstract_device
        kind = None if device is None else device.device_kind
        if kind != self.device_kind:
            raise self._stale(f"is for {self.device_kind!r}, this program for {kind!r}")
        if dict(mesh.shape) != dict(self.mesh):
            there = f"{_pairs(self.mesh)}, here it is {_pairs(mesh.shape)}"
            raise self._stale(f"is for a mesh of {there}")
        options = traced_options(self.compiler_options)
        if _texts(options) != _texts(self.compiler_options):
            there = f"{_pairs(self.compiler_options)}, here there are {_pairs(options)}"
            raise self._stale(f"is for the compiler options {there}")

    def _stale(self, why: str) -> ValueError:
        return value_error(f"{self.name} {why}; write it again: {self.command}")

    @cached_property
    def _hash(self) -> int:  # needed in each call of a jitted function
        return hash(self._text())

    def _text(self) -> str:
        record = asdict(self)
        del record["name"]
        return json.dumps(record, indent=1)


def _check_record(path: str | Path, record: Any, again: str) -> None:
    wanted = [field.name for field in fields(Tuning) if field.name != "name"]
    entries = record if isinstance(record, dict) else {}
    if lacking := [name for name in wanted if name not in entries]:
        raise value_error(f"{path} does not have {', '.join(lacking)}; {again}")
    command = entries["command"]
    if isinstance(command, str) and command.startswith("jaxpar tune"):
        again = f"write it again: {command}"
    for name, value in entries.items():
        if name not in wanted:
            raise value_error(f"{path} has {name!r}, which is no field of a tuning; {again}")
        is_right, form = _FORM[name]
        if not is_right(value):
            shown = repr(value)
            shown = shown if len(shown) < 100 else f"{shown[:100]}..."
            raise value_error(f"{path} must have {form}, but {name} is {shown}; {again}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return _is_number(value) and isinstance(value, int) and value > 0


def _mapping_of(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(is_right, value.values()))


# For each field, a check of its JSON, and its description in errors.
_FORM: dict[str, tuple[Callable[[Any], bool], str]] = {
    "command": (_is_text, "the command that writes it"),
    "versions": (_mapping_of(_is_text), "the version of each package"),
    "device_kind": (_is_text, "the kind of the devices"),
    "mesh": (_mapping_of(_is_size), "the size of each axis of the mesh"),
    "compiler_options": (
        _mapping_of(lambda value: isinstance(value, str | int | float)),
        "a text or number for each compiler option",
    ),
    "sites": (
        _mapping_of(_mapping_of(_is_text)),
        'a way for each part of each of its sites, such as {"forward": "naive", "backward": '
        '"auto"}',
    ),
    "clock": (_is_text, "the name of its clock"),
    "milliseconds": (_mapping_of(_is_number), "the milliseconds of each program"),
    "tried": (lambda value: isinstance(value, dict), "what was tried at each site"),
}


@readable
@contextmanager
def tuned(tuning: TuningLike) -> Generator[None]:
    """Gives `mode="auto"` the modes found by `jaxpar tune`, for programs traced in the block.

    Args:
      tuning: the file, or a `Tuning`.

    A mode other than `"auto"` takes precedence. `jaxpar.jit(step, tuned=path)` does the same for
    one program.

    Raises:
      ValueError: the file is missing, or was written for other versions of jax or the compiler, or
        (while tracing) for another device kind, mesh, compiler options or shapes. The message has
        the command that writes it again.

    Cost: programs that were traced without it are traced again.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> gather = jax.shard_map(lambda x, w: all_gather_matmul(x, w, "tp"), mesh=mesh,
      ...     in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"))
      >>> sites = {"matmul over tp=8: gather a of ak,kn->an, float32; 2x4, 4x4":
      ...     {"forward": "bidirectional", "backward": "naive"}}
      >>> with tuned(Tuning("by hand", "-", {}, "cpu", {"tp": 8}, {}, sites)):
      ...     jax.jit(gather)(jnp.ones((16, 4)), jnp.ones((4, 32))).shape
      (16, 32)
    """
    if is_trying():  # the trial may be writing this file
        yield
        return
    with using(load(tuning)):
        yield


def load(tuning: TuningLike) -> Tuning:
    with naming("tuned"):
        passed: Any = tuning
        if not isinstance(passed, (str, Path, Tuning)):
            raise type_error(f"tuning must be a path or a jaxpar.Tuning, got {tuning!r}")
        loaded = passed if isinstance(passed, Tuning) else Tuning.read(passed)
        loaded.check_versions()
        return loaded


def versions(*packages: str) -> dict[str, str]:
    texts = {package: installed(package) for package in packages}
    return {package: text for package, text in texts.items() if text is not None}


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items()) or "none"


def _texts(options: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value).lower() for name, value in options.items()}
