"""Plain records for what `gpufs cp` loads: dataclasses without the import of :mod:`dataclasses`.

A copy of 16 GiB takes a third of a second; that module and what it imports take a twentieth of it. A type checker sees
the real decorator; this one gives what is used here: an initialiser with defaults, equality, a representation, and no
assignment to the fields of frozen ones.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _is_field(annotation: str) -> bool:
    return not annotation.startswith("ClassVar")


def dataclass(*, frozen: bool = False) -> Any:
    """Decorates a class in a module that has ``from __future__ import annotations``; as dataclasses.dataclass."""

    def decorate(cls: Any) -> Any:
        names = tuple(name for name, annotation in cls.__annotations__.items() if _is_field(annotation))
        defaults = {name: cls.__dict__[name] for name in names if name in cls.__dict__}

        def initialise(self: Any, *values: Any, **named: Any) -> None:
            if len(values) > len(names):
                raise TypeError(f"{cls.__name__} takes {len(names)} values, {len(values)} were given")
            given = dict(zip(names, values, strict=False))
            for name, value in named.items():
                if name not in names or name in given:
                    raise TypeError(f"{cls.__name__}: unexpected or repeated {name}")
                given[name] = value
            for name in names:
                if name not in given:
                    if name not in defaults:
                        raise TypeError(f"{cls.__name__}: {name} is missing")
                    given[name] = defaults[name]
            self.__dict__.update(given)

        def represent(self: Any) -> str:
            fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
            return f"{cls.__name__}({fields})"

        def equal(self: Any, other: Any) -> Any:
            return self.__dict__ == other.__dict__ if other.__class__ is self.__class__ else NotImplemented

        def refuse(self: Any, name: str, value: Any = None) -> None:
            raise AttributeError(f"{cls.__name__}.{name} cannot be changed")

        cls.__init__, cls.__repr__, cls.__eq__ = initialise, represent, equal
        cls.__hash__ = None
        if frozen:
            cls.__setattr__ = cls.__delattr__ = refuse
            cls.__hash__ = lambda self: hash(tuple(getattr(self, name) for name in names))
        return cls

    return decorate
