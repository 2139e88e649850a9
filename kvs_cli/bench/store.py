"""The rows of a sweep on disk: ``sweep.jsonl`` grows by a row that is safe when ``add`` returns, ``sweep.csv`` is
written anew beside it. Whatever ends the process, both are valid."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from pathlib import Path

from kvs_cli.bench.columns import COLUMNS, Cell, Row
from kvs_core.errors import SettingsError
from kvs_core.settings.kinds import shown


class RowStore:
    """The rows of one folder, in the order in which they were finished."""

    def __init__(self, folder: Path, *, resume: bool) -> None:
        """Makes the folder. Raises SettingsError if it cannot be, holds a measured row and ``resume`` is not given, or
        one with other columns: then nothing is touched.

        With ``resume`` rows without error are kept; failed ones, and a row that was cut short, are dropped.
        """
        self._jsonl, self._csv = folder / "sweep.jsonl", folder / "sweep.csv"
        self.rows: list[Row] = []
        try:
            if self._jsonl.exists():
                rows = [row for row in read_jsonl(self._jsonl) if not row.get("error")]
                if rows and not resume:
                    raise SettingsError(f"{folder}: holds a sweep already; add --resume to go on with it, or give "
                                        "another --output")
                _check_columns(self._jsonl, rows)
                self.rows = rows
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            _replace(self._jsonl, "".join(map(_line, self.rows)))
            self._write_csv()
        except OSError as error:
            raise SettingsError(f"--output {folder}: {error.strerror or error}; give a folder that can be written"
                                ) from None

    @property
    def keys(self) -> set[Cell]:
        """Of the rows that need not be measured again."""
        return {row["key"] for row in self.rows if not row.get("error")}

    def add(self, row: Row) -> None:
        """Keep a row: flushed to the disk. Raises SettingsError."""
        ordered: Row = {name: row.get(name) for name in COLUMNS}
        try:
            with self._jsonl.open("a", encoding="utf-8") as file:
                file.write(_line(ordered))
                file.flush()
                os.fsync(file.fileno())
            self.rows.append(ordered)
            self._write_csv()
        except OSError as error:
            raise SettingsError(f"{self._jsonl}: {error.strerror or error}; make room, and go on with --resume"
                                ) from None

    def _write_csv(self) -> None:
        lines = [",".join(COLUMNS)]
        for row in self.rows:
            lines.append(_csv_line([_text(row.get(name)) for name in COLUMNS]))
        _replace(self._csv, "\n".join(lines) + "\n")


def _check_columns(path: Path, rows: Sequence[Row]) -> None:
    for row in rows:
        if others := sorted(row.keys() ^ COLUMNS.keys()):
            has = "has a column" if others[0] in row else "lacks the column"
            raise SettingsError(f"{path}: a row {has} {shown(others[0])}, so another version of kvs has written it; go "
                                "on with that one, or give another --output")


def read_jsonl(path: Path) -> list[Row]:
    """Rows of a file; the last line may be cut short, and is then left out. Raises SettingsError for anything else."""
    rows: list[Row] = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and isinstance(row.get("key"), str):
            rows.append(row)
        elif number < len(lines):
            raise SettingsError(f"{path}: line {number} is no row of a sweep; mend or remove the file")
    return rows


def read_csv(path: Path) -> list[Row]:
    """Rows of ``sweep.csv``: numbers and truth values are those again. Raises SettingsError."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = set(COLUMNS) - set(reader.fieldnames or ())
            if missing:
                raise SettingsError(f"{path}: has no column {min(missing)}; give the folder of a sweep")
            return [{name: _cell(row[name] or "") for name in COLUMNS} for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise SettingsError(f"{path}: {reason}; give the folder of a sweep") from None


def write_text(path: Path, text: str) -> None:
    """A file of the sweep's folder, whole or not at all. Raises SettingsError."""
    try:
        _replace(path, text)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror or error}; give a folder that can be written") from None


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.new")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _text(cell: Cell) -> str:
    if cell is None:
        return ""
    return str(cell).lower() if isinstance(cell, bool) else str(cell)


def _csv_line(cells: Sequence[str]) -> str:
    return ",".join(f'"{cell.replace(chr(34), chr(34) * 2)}"' if set(cell) & set(',"\r\n') else cell for cell in cells)


def _cell(text: str) -> Cell:
    if text in ("", "true", "false"):
        return None if not text else text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
