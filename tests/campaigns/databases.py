"""SQLite with several writers and readers at once, in both of its ways to commit; then its own integrity check."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from support.processes import start_children, wait_children

from campaigns.harness import Place

WRITERS, READERS = 4, 2


def write_ahead(place: Place) -> str:
    return _run(place, "wal")


def rollback(place: Place) -> str:
    return _run(place, "delete")


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=120, isolation_level=None)


def _run(place: Place, journal: str) -> str:
    path = place.root / "data.sqlite"
    rounds = 30 if place.quick else 400
    database = _connect(path)
    mode = database.execute(f"PRAGMA journal_mode={journal}").fetchone()[0]
    assert mode == journal, mode
    database.execute("CREATE TABLE account (id INTEGER PRIMARY KEY, amount INTEGER)")
    database.execute("CREATE TABLE history (who INTEGER, n INTEGER, text BLOB)")
    database.execute("CREATE INDEX by_text ON history (text)")
    database.executemany("INSERT INTO account VALUES (?, 1000)", [(number,) for number in range(50)])
    database.close()

    def write(who: int) -> None:
        own = _connect(path)
        for n in range(rounds):
            own.execute("BEGIN IMMEDIATE")
            own.execute("UPDATE account SET amount = amount - 7 WHERE id = ?", ((who * 7 + n) % 50,))
            own.execute("UPDATE account SET amount = amount + 7 WHERE id = ?", ((who * 11 + 3 * n + 1) % 50,))
            own.execute("INSERT INTO history VALUES (?, ?, randomblob(3000))", (who, n))
            own.execute("DELETE FROM history WHERE who = ? AND n = ?", (who, n - 20))
            own.execute("ROLLBACK" if n % 10 == 9 else "COMMIT")
        own.close()

    def read(_: int) -> None:
        own = _connect(path)
        for _ in range(rounds):
            total = own.execute("SELECT sum(amount) FROM account").fetchone()[0]
            assert total == 50_000, f"a reader saw half a transaction: {total}"
        own.close()

    children = start_children(WRITERS, write) + start_children(READERS, read)
    wait_children(children)
    database = _connect(path)
    check = database.execute("PRAGMA integrity_check").fetchall()
    assert check == [("ok",)], check
    assert database.execute("SELECT sum(amount) FROM account").fetchone()[0] == 50_000
    database.execute("VACUUM")
    assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    database.close()
    return f"{WRITERS} writers of {rounds} transactions, {READERS} readers, integrity ok"
