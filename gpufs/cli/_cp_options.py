"""The options of `gpufs cp`, and reading them without click: that would take longer than most copies."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Final


class Option:
    """An option of the command.

    ``choices``: what its value may be, None where it is a flag or, with ``metavar``, any text. ``stores``: the name and
    the value that a flag sets, where several flags share a name and the last of them counts. ``refused``: why it is not
    there, for those that users of cp would look for.
    """

    def __init__(
        self,
        names: str,
        text: str,
        default: Any = False,
        choices: Sequence[str] | None = None,
        metavar: str = "",
        *,
        stores: tuple[str, str] | None = None,
        refused: str = "",
    ) -> None:
        self.names = names.split()
        self.name = stores[0] if stores else self.names[-1].removeprefix("--").replace("-", "_")
        self.text = text
        self.default = None if stores else default
        self.choices = choices
        self.metavar = metavar
        self.value = stores[1] if stores else True
        self.refused = refused

    @property
    def is_flag(self) -> bool:
        return not self.metavar


_LINKS: Final = "makes links and copies no bytes: use cp"

OPTIONS: Final = (
    Option("-r -R --recursive", "Copy directories with all that is in them."),
    Option("-p --preserve", "Keep mode, times and, where allowed, owner."),
    Option("-a --archive", "As -r -p."),
    Option("-n --no-clobber", "Leave files alone that exist already.", stores=("existing", "skip")),
    Option("-i --interactive", "Ask before a file is overwritten; draws no bar.", stores=("existing", "ask")),
    Option("-u --update", "Leave files alone that are as new as their source, or newer."),
    Option("-f --force", "Remove a file that cannot be opened for writing, and make it anew."),
    Option(
        "--remove-destination",
        "Remove each file that exists and make it anew: who has it open or mapped keeps the old one.",
    ),
    Option("-L --dereference", "Copy what symbolic links lead to.", stores=("links", "follow")),
    Option("-P --no-dereference", "Copy symbolic links as links (so it is with -r).", stores=("links", "keep")),
    Option("-H", "Follow the symbolic links among the SOURCEs alone.", stores=("links", "named")),
    Option("-x --one-file-system", "Do not go into directories of other file systems; they are made, empty."),
    Option("-t --target-directory", "Copy every SOURCE into DIR; there is no DEST.", None, metavar="DIR"),
    Option("-T --no-target-directory", "DEST is the name of the copy, not a directory for it."),
    Option("-j --jobs", "Files copied at once, 1 to 16.", "4", tuple(map(str, range(1, 17))), "N"),
    Option("--verify", "Read both files again and compare them by SHA-256; with --fsync from the disk."),
    Option("--fsync", "Files of the host are on their disk before the end."),
    Option(
        "--fastpath",
        "Copies between file and device without the host's memory: auto is as the mount is configured.",
        "auto",
        ("auto", "off", "require"),
        "auto|off|require",
    ),
    Option("-v --verbose", "Print a line for each file copied, with --json on standard error."),
    Option("--json", "Print a JSON object that tells what was copied, and how."),
    Option("--progress", "Draw a progress bar, also where standard error is not a terminal."),
    Option("--no-progress", "Draw none."),
    Option("-l --link", "", refused=_LINKS),
    Option("-s --symbolic-link", "", refused=_LINKS),
)


def parse(words: Sequence[str]) -> dict[str, Any] | None:
    """The options, and the names under "names"; None for what is not plainly right (then click tells the user)."""
    options = {name: option for option in OPTIONS for name in option.names}
    values: dict[str, Any] = {option.name: option.default for option in OPTIONS}
    names: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            names += rest
            break
        if not word.startswith("-") or word == "-":
            names.append(word)
            continue
        if word.startswith("--"):
            name, equals, value = word.partition("=")
        else:
            name, equals, value = word[:2], "", word[2:]
        option = options.get(name)
        if option is None:
            return None
        if option.is_flag:
            if equals:
                return None
            values[option.name] = option.value
            if value:  # -rp is -r -p
                rest.insert(0, "-" + value)
            continue
        if not equals and not value:
            if not rest:
                return None
            value = rest.pop(0)
        if option.choices is not None and value not in option.choices:
            return None
        values[option.name] = value
    if len(names) < (1 if values["target_directory"] is not None else 2):
        return None
    return values | {"names": names}
