"""Shows the tensors of a torch module of this program as files of one directory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from types import MappingProxyType
from typing import Any, Protocol

from gpufs._naming import named_in
from gpufs.client._register import Registration, register_array
from gpufs.exceptions import failure_of_mount
from gpufs.syscalls import Closing


class Module(Protocol):
    """The methods of torch.nn.Module that are used here."""

    def named_parameters(self, *, remove_duplicate: bool = ...) -> Iterable[tuple[str, Any]]: ...
    def named_buffers(self, *, remove_duplicate: bool = ...) -> Iterable[tuple[str, Any]]: ...


@named_in("gpufs")
class ModuleRegistration(Closing):
    """The tensors of a module that are files until :meth:`close`, or until the program ends.

    Attributes
    ----------
    path : str
        The directory.
    tensors : mapping of str to Registration
        The file of each tensor, by its name in the module.
    """

    def __init__(self, path: str, tensors: dict[str, Registration], opened: ExitStack) -> None:
        self.path = path
        self.tensors: Mapping[str, Registration] = MappingProxyType(tensors)
        self._opened = opened

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return sum(one.nbytes for one in {*self.tensors.values()})

    @property
    def closed(self) -> bool:
        """Whether no file shows a tensor any longer."""
        return all(one.closed for one in self.tensors.values())

    def close(self) -> None:
        """End the registrations as :meth:`Registration.close`. A second call does nothing.

        The directory is removed if :func:`register` has created it and nothing else is in it.

        Raises
        ------
        OSError
            ETIMEDOUT: a copy from or to a file does not end. The others are closed; close() can be called again.
        """
        failure = None
        for one in self.tensors.values():
            try:
                one.close()
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure
        self._opened.close()

    def __repr__(self) -> str:
        closed = ", closed" if self.closed else ""
        return f"<gpufs.ModuleRegistration {self.path} ({len(self.tensors)} tensors, {self.nbytes} bytes{closed})>"


def register_module(module: Module, directory: str, mode: int) -> ModuleRegistration:
    """Create a file for each parameter and buffer. After a failure there are none."""
    tensors: dict[str, Registration] = {}
    by_tensor: dict[int, Registration] = {}
    with ExitStack() as opened:
        try:
            os.mkdir(directory)
            opened.callback(_remove, directory)
        except FileExistsError:
            pass
        except OSError as error:
            raise failure_of_mount(error, directory) from None
        for named in (module.named_parameters, module.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                if not tensor.numel():
                    continue
                path = os.path.join(directory, name)
                if (tied := by_tensor.get(id(tensor))) is not None:
                    os.link(tied.path, path)
                    tensors[name] = tied
                    continue
                try:
                    one = opened.enter_context(register_array(tensor, path, None, mode))
                except (TypeError, ValueError) as error:
                    raise type(error)(f"{name}: {error}") from None
                tensors[name] = by_tensor[id(tensor)] = one
        opened = opened.pop_all()
    return ModuleRegistration(directory, tensors, opened)


def _remove(directory: str) -> None:
    with suppress(OSError):  # something else is in it
        os.rmdir(directory)
