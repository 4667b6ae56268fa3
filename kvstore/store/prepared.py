"""Statements that run in every put and load: compiled once, then executed by the driver itself.

What SQLAlchemy does around an execution (events, contexts, results) takes ten times as long
as SQLite takes to find or write a row. The statements stay those of Core, with its types,
for whatever database the connection is to; transactions stay those of the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

__all__ = ["Prepared"]

_Process = Callable[[Any], Any]


class _Compiled:
    """A statement in one database's words."""

    def __init__(self, statement: Any, names: Iterable[str], dialect: sa.Dialect) -> None:
        made: Any = statement.compile(dialect=dialect, column_keys=list(names))
        self.text = str(made)
        self._fixed = {name: bind.effective_value for name, bind in made.binds.items() if not bind.required}
        self._named = made.positiontup is None
        self._binds: list[tuple[str, _Process | None]] = [
            (name, made.binds[name].type.dialect_impl(dialect).bind_processor(dialect))
            for name in (made.binds if self._named else made.positiontup)
        ]
        columns = () if isinstance(statement, sa.TextClause) else statement.exported_columns
        found = (column.type.dialect_impl(dialect).result_processor(dialect, None) for column in columns)
        self._results: list[tuple[int, _Process]] = [(at, item) for at, item in enumerate(found) if item is not None]

    def arguments(self, values: Mapping[str, Any]) -> list[Any] | dict[str, Any]:
        """What the driver is given for these values."""
        known = {**self._fixed, **values}
        made = [known[name] if process is None else process(known[name]) for name, process in self._binds]
        return dict(zip((name for name, _ in self._binds), made, strict=True)) if self._named else made

    def rows(self, cursor: Any) -> list[tuple[Any, ...]]:
        """What the driver found, with the types of the statement's columns."""
        if cursor.description is None:
            return []
        found: list[tuple[Any, ...]] = cursor.fetchall()
        return [self._row(row) for row in found] if self._results else found

    def _row(self, row: Sequence[Any]) -> tuple[Any, ...]:
        values = list(row)
        for at, process in self._results:
            values[at] = process(values[at])
        return tuple(values)


class Prepared:
    """One statement; every call gives values for the same parameters. Errors are those of the driver."""

    def __init__(self, statement: sa.Executable) -> None:
        """Compile it when it is first used: ``statement`` has no parameter that expands to a list."""
        self._statement = statement
        self._compiled: dict[str, _Compiled] = {}

    def __call__(self, connection: sa.Connection, **values: Any) -> list[tuple[Any, ...]]:
        """Execute it; gives all rows."""
        compiled = self._for(connection, values)
        return compiled.rows(_driver(connection).execute(compiled.text, compiled.arguments(values)))

    def first(self, connection: sa.Connection, **values: Any) -> tuple[Any, ...] | None:
        """Execute it; gives the first row, if there is one."""
        return next(iter(self(connection, **values)), None)

    def _for(self, connection: sa.Connection, names: Iterable[str]) -> _Compiled:
        name = connection.dialect.name
        if name not in self._compiled:
            self._compiled[name] = _Compiled(self._statement, names, connection.dialect)
        return self._compiled[name]


def _driver(connection: sa.Connection) -> Any:
    if not connection.in_transaction():
        connection.begin()
    return connection.connection.driver_connection
