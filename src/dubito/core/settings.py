"""`Setting`: frozen objects that say what to do, print as they were typed, compare by value, and convert to JSON.

Recipes, selection rules, priors, likelihoods, objectives, pruning rules and `Training` are all settings. A setting is a
frozen dataclass whose fields are plain values, tuples, dicts, tensors or other settings. Tensors are compared by their
digests and saved beside the JSON, not in it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import inspect
import json
import math
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, dataclass_transform

import numpy as np
import torch
from torch import Tensor

from dubito.core.arrays import checked
from dubito.core.constraints import check, kinds_of
from dubito.core.errors import InputError

_T = TypeVar("_T")
_REGISTRY: dict[str, type[Setting]] = {}


def digest(tensor: Tensor) -> str:
    """Return a short digest of a tensor's type, shape and bytes."""
    value = tensor.detach().cpu()
    total = hashlib.sha256(f"{value.dtype}{tuple(value.shape)}".encode())
    total.update(bytes_of(value))
    return total.hexdigest()[:16]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor in the order of its entries, without a copy if it is contiguous."""
    value = tensor.detach().contiguous()
    if not value.numel():
        return memoryview(b"")
    # a tensor of one entry is contiguous with any stride, but can be viewed as bytes only with a stride of 1
    return value.as_strided((value.numel(),), (1,)).view(torch.uint8).numpy().data


class Setting:
    """Base class of all settings; subclasses are found by their `setting_name`, such as ``"priors.Normal"``."""

    setting_name: ClassVar[str] = ""
    former_names: ClassVar[tuple[str, ...]] = ()
    """Names in files of earlier versions, which are still read."""
    described: ClassVar[str] = ""
    """What an error calls a value of this kind, such as "one of dubito.priors"."""
    old_fields: ClassVar[Mapping[str, str]] = {}
    """Old names of fields and their new ones: still accepted, with a `DeprecationWarning`."""
    old_values: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """For each field, old spellings of its values and their new ones."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "setting_name" in cls.__dict__:
            for name in (cls.setting_name, *cls.__dict__.get("former_names", ())):
                _REGISTRY[_key(name)] = cls
        else:  # not the inherited name, under which it would be loaded as its parent class
            cls.setting_name = cls.__name__

    def __post_init__(self) -> None:
        _check_fields(self)

    if not TYPE_CHECKING:  # type checkers would accept every misspelled attribute

        def __getattr__(self, name: str) -> Any:
            if name in type(self).old_fields:
                return getattr(self, _new_name(type(self), name))
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def fields(self) -> dict[str, Any]:
        """Return the fields by name, in the order of the signature."""
        return {field.name: getattr(self, field.name) for field in _fields(self)}

    def changed_fields(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        defaults = {field.name: _default(field) for field in _fields(self)}
        return {k: v for k, v in self.fields().items() if canonical(v) != canonical(defaults[k])}

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        renamed = {_new_name(type(self), name): value for name, value in changes.items()}
        return dataclasses.replace(self, **renamed)  # type: ignore[type-var]

    def to_json(self, tensors: dict[str, Tensor] | None = None) -> dict[str, Any]:
        """Return the setting as a JSON value; its tensors are put into `tensors` under their digests."""
        return _encode(self, tensors)

    @staticmethod
    def from_json(value: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> Any:
        """Return the setting that `to_json` wrote."""
        return _decode(value, tensors or {})

    def __repr__(self) -> str:
        changed, shown = self.changed_fields(), []
        for field in _fields(self):
            if field.name not in changed:
                continue
            leading = _default(field) is dataclasses.MISSING and not field.kw_only
            shown.append(_show(changed[field.name]) if leading else f"{field.name}={_show(changed[field.name])}")
        return f"{self.setting_name}({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and canonical(self) == canonical(other)

    def __hash__(self) -> int:
        return hash(canonical(self))


@dataclass_transform(eq_default=False, frozen_default=True)
def setting(cls: type[_T]) -> type[_T]:
    """Turn a class into a frozen dataclass with the comparison, hash and `repr` of `Setting`.

    Every value is checked against the annotation of its field. Then the class's own `__post_init__` is called, which
    checks fields that depend on each other.
    """
    post_init = cls.__dict__.get("__post_init__")
    if post_init is not None:

        @functools.wraps(post_init)
        def checked_post_init(self: Any) -> None:
            _check_fields(self)
            post_init(self)

        cls.__post_init__ = checked_post_init  # type: ignore[attr-defined]
    made: Any = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    init = made.__init__
    signature = inspect.signature(init)

    @functools.wraps(init)
    def checked_init(self: Any, *args: Any, **kwargs: Any) -> None:
        renamed = {_new_name(type(self), name): value for name, value in kwargs.items()}
        try:
            signature.bind(self, *args, **renamed)
        except TypeError as error:
            known = ", ".join(field.name for field in _fields(made)) or "none"
            raise InputError(f"{type(self).setting_name}: {error}; its arguments are {known}.") from error
        init(self, *args, **renamed)

    made.__init__ = checked_init
    return made


def _check_fields(own: Any) -> None:
    """Replace old spellings by new ones, and check every field against its annotation."""
    cls: Any = type(own)
    for name, kind in kinds_of(cls).items():
        value = getattr(own, name)
        if isinstance(value, Tensor):
            checked(value)
        if isinstance(value, str) and value in own.old_values.get(name, ()):
            new = own.old_values[name][value]
            _warn_of_old(f"{own.setting_name}({name}={value!r})", f"{name}={new!r}")
            object.__setattr__(own, name, new)
        elif isinstance(value, list) and kind is not Any:
            check(name, kind, tuple(value))
            object.__setattr__(own, name, tuple(value))
        elif not isinstance(value, Absent):
            check(name, kind, value)


def _new_name(cls: type[Setting], name: str) -> str:
    if name not in cls.old_fields:
        return name
    _warn_of_old(f"{cls.setting_name}({name}=...)", f"{cls.old_fields[name]}=...")
    return cls.old_fields[name]


def _warn_of_old(old: str, new: str) -> None:
    ours, depth, frame = (__name__.partition(".")[0], "dataclasses"), 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in ours:
        depth, frame = depth + 1, frame.f_back  # the line of the user's code
    warnings.warn(f"{old} is the old spelling: write {new}.", DeprecationWarning, stacklevel=depth)


@dataclasses.dataclass(frozen=True)
class Absent:
    """A placeholder for an object that is compared by content but not saved with the setting, such as a posterior."""

    content: str

    def digest(self) -> str:
        """Return the digest of the object."""
        return self.content


def canonical(value: Any) -> str:
    """Return text that is the same for equal values: 1 and 1.0, a list and a tuple, two tensors of the same content."""
    return json.dumps(_encode(value, None, exact=False), sort_keys=True)


def find(name: str, namespace: str = "") -> type[Setting]:
    """Return the setting class called `name`; case, "-" and "_" are ignored.

    A name without a prefix is searched in `namespace`, then among the recipes, then everywhere.
    """
    key = _key(name)
    preferred = key if "." in key or not namespace else f"{_key(namespace)}.{key}"
    if preferred not in _REGISTRY:
        load_all()
    for candidate in (preferred, key):
        if candidate in _REGISTRY:
            return _REGISTRY[candidate]
    elsewhere = [cls for full, cls in _REGISTRY.items() if full.split(".")[-1] == key]
    if len(elsewhere) == 1:
        return elsewhere[0]
    if elsewhere:
        raise InputError(f"'{name}' is ambiguous: write one of {_names(elsewhere)}.")
    known = [cls for full, cls in _REGISTRY.items() if full.rpartition(".")[0] == _key(namespace)]
    raise InputError(f"There is no setting called '{name}'; known here: {_names(known)}.")


@functools.cache
def load_all() -> None:
    """Import the whole public surface, so that all settings and posteriors are registered."""
    package = importlib.import_module(__name__.partition(".")[0])
    for part in (package, *(getattr(package, name) for name in package.__all__)):
        for name in getattr(part, "__all__", ()):
            getattr(part, name)


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _names(classes: list[type[Setting]]) -> str:
    return ", ".join(sorted(cls.setting_name for cls in classes)) or "none"


def _fields(setting: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(setting)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _show(value: Any) -> str:
    """Return text that `dubito.parse` reads as `value`, if there is any."""
    if isinstance(value, Tensor):
        return f"<tensor {'x'.join(map(str, value.shape))} {digest(value)[:6]}>"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_show(k)}: {_show(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_show, value)) + "]"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_show, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, type):
        return f"nn.{value.__name__}" if value.__module__.startswith("torch.nn.") else value.__qualname__
    return repr(value.item() if isinstance(value, np.generic) else value)


def _encode(value: Any, tensors: dict[str, Tensor] | None, exact: bool = True) -> Any:
    """Return `value` as JSON; unless `exact`, equal numbers such as 1 and 1.0 are written in the same way."""

    def encode(part: Any) -> Any:
        return _encode(part, tensors, exact)

    if isinstance(value, Setting):
        return {"$setting": value.setting_name, **{k: encode(v) for k, v in value.fields().items()}}
    if isinstance(value, Tensor):
        key = digest(value)
        if tensors is not None:
            tensors[key] = value.detach().cpu()
        return {"$tensor": key}
    if isinstance(value, Mapping):
        pairs = [[encode(k), encode(v)] for k, v in value.items()]
        return {"$dict": pairs if exact else sorted(pairs, key=json.dumps)}
    if isinstance(value, tuple | list):
        return {"$tuple": [encode(v) for v in value]}
    if isinstance(value, type):
        return {"$type": f"{value.__module__}:{value.__qualname__}"}
    if isinstance(value, np.generic):
        return encode(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if isinstance(value, float) and not exact and value.is_integer():
        return int(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if value is dataclasses.MISSING:
        return {"$missing": True}
    if callable(getattr(value, "digest", None)):  # a posterior inside a setting: compared by its content
        return {"$object": value.digest()}
    raise InputError(f"A setting cannot hold a {type(value).__name__}; use numbers, text, tensors or other settings.")


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, Mapping):
        return value
    if "$setting" in value:
        return _decode_setting(value, tensors)
    if "$tensor" in value:
        if value["$tensor"] not in tensors:
            raise InputError("A tensor of this setting is missing beside its JSON: save both again.")
        return tensors[value["$tensor"]]
    if "$dict" in value:
        return {_decode(k, tensors): _decode(v, tensors) for k, v in value["$dict"]}
    if "$tuple" in value:
        return tuple(_decode(v, tensors) for v in value["$tuple"])
    if "$float" in value:
        return float(value["$float"])
    if "$type" in value:
        return _decode_type(value["$type"])
    if "$object" in value:
        return Absent(value["$object"])
    raise InputError(f"The JSON of a setting has an entry with unknown keys {sorted(value)}: upgrade Dubito.")


def _decode_setting(value: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Setting:
    cls = find(value["$setting"])
    fields = {cls.old_fields.get(k, k): _decode(v, tensors) for k, v in value.items() if k != "$setting"}
    for name, new in cls.old_values.items():  # a file keeps the spelling of its time
        if isinstance(fields.get(name), str):
            fields[name] = new.get(fields[name], fields[name])
    unknown = fields.keys() - {field.name for field in _fields(cls)}
    if unknown:
        raise InputError(f"{cls.setting_name} has no field '{min(unknown)}' in this version of Dubito: upgrade it.")
    return cls(**fields)


def _decode_type(text: str) -> type[Any]:
    """Return a type by name from a module that is already imported: reading a file must not import anything."""
    module, _, name = text.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # not getattr, which may run a module's `__getattr__`
    if not isinstance(found, type):
        raise InputError(f"A saved setting names the type '{text}': import the module that defines it first.")
    return found
