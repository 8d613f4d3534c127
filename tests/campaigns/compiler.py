"""A C compiler and make build a generated project; a second make finds nothing to do; the program runs from there."""

from __future__ import annotations

from pathlib import Path

from campaigns.harness import Place, need, program

MAKEFILE = """
OBJECTS = $(patsubst %.c,%.o,$(wildcard unit*.c)) main.o
program: libunits.a main.o
\tcc -o $@ main.o libunits.a
libunits.a: $(filter-out main.o,$(OBJECTS))
\tar rcs $@ $^
%.o: %.c units.h
\tcc -O1 -g -c -o $@ $<
"""


def write_project(base: Path, units: int, functions: int) -> int:
    """The sources; what the program must print."""
    base.mkdir()
    header = ["#pragma once"]
    calls = []
    for unit in range(units):
        body = ['#include "units.h"', f"static const long table{unit}[] = {{{','.join(map(str, range(300)))}}};"]
        for number in range(functions):
            name = f"f{unit}_{number}"
            header.append(f"long {name}(long x);")
            body.append(f"long {name}(long x) {{ return x + table{unit}[{(unit + number) % 300}]; }}")
            calls.append((name, (unit + number) % 300))
        (base / f"unit{unit}.c").write_text("\n".join(body) + "\n")
    (base / "units.h").write_text("\n".join(header) + "\n")
    lines = "\n".join(f"  x = {name}(x);" for name, _ in calls)
    main = f'#include <stdio.h>\n#include "units.h"\nint main(void) {{\n  long x = 0;\n{lines}\n'
    (base / "main.c").write_text(main + '  printf("%ld\\n", x);\n  return 0;\n}\n')
    (base / "Makefile").write_text(MAKEFILE)
    return sum(value for _, value in calls)


def build(place: Place) -> str:
    need("cc", "make", "ar")
    units, functions = (8, 40) if place.quick else (150, 120)
    base = place.root / "project"
    expected = write_project(base, units, functions)
    program("make", "-s", "-j4", cwd=base)
    output = program(base / "program").strip()
    assert output == str(expected), f"the program printed {output}, expected {expected}"
    again = program("make", "-j4", cwd=base)
    assert "up to date" in again, again
    (base / "unit0.c").touch()
    rebuilt = program("make", "-j4", cwd=base).splitlines()
    assert sum("-c -o" in line for line in rebuilt) == 1, rebuilt
    assert program(base / "program").strip() == str(expected)
    return f"{units} sources of {functions} functions; make knows what is new"
