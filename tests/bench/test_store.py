"""The rows of a sweep on disk."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_cli.bench.columns import COLUMNS
from kvs_cli.bench.store import RowStore, read_csv, read_jsonl
from kvs_core.errors import SettingsError
from tests.bench.rows import measured

CELLS = st.one_of(st.none(), st.booleans(), st.integers(-9, 1 << 40), st.floats(1e-6, 1e12),
                  st.text(st.characters(categories=("L", "P", "Zs"), exclude_characters="\0"), max_size=12)
                  .map(lambda text: f"x{text}"))


def test_rows_are_there_as_soon_as_they_are_added(tmp_path: Path) -> None:
    """Both files hold the same columns and rows after every row, and no other file is left beside them."""
    store = RowStore(tmp_path / "new" / "folder", resume=False)
    folder = tmp_path / "new" / "folder"
    for number in range(1, 4):
        store.add(measured(1024 * number))
        contexts = [1024 * count for count in range(1, 1 + number)]
        assert [row["context_capacity"] for row in read_jsonl(folder / "sweep.jsonl")] == contexts
        assert [row["context_capacity"] for row in read_csv(folder / "sweep.csv")] == contexts
    assert list(json.loads((folder / "sweep.jsonl").read_text().splitlines()[0])) == list(COLUMNS)
    assert sorted(path.name for path in folder.iterdir()) == ["logs", "sweep.csv", "sweep.jsonl"]


def test_resume_keeps_what_is_finished(tmp_path: Path) -> None:
    """Failed rows and a row that was cut short by a crash are dropped, so that they are measured again."""
    store = RowStore(tmp_path, resume=False)
    store.add(measured(1024))
    store.add(measured(2048, error="it broke"))
    with (tmp_path / "sweep.jsonl").open("a") as file:
        file.write('{"key": "cut sho')
    again = RowStore(tmp_path, resume=True)
    assert again.keys == {"1024-0"}
    again.add(measured(2048))
    assert [row["error"] for row in read_jsonl(tmp_path / "sweep.jsonl")] == [None, None]
    assert [row["key"] for row in read_csv(tmp_path / "sweep.csv")] == ["1024-0", "2048-0"]


def test_a_finished_sweep_is_not_overwritten(tmp_path: Path) -> None:
    """Without --resume a folder that holds one is refused, and a file that is no sweep is too."""
    RowStore(tmp_path, resume=False).add(measured())
    with pytest.raises(SettingsError, match="--resume"):
        RowStore(tmp_path, resume=False)
    assert len(read_csv(tmp_path / "sweep.csv")) == 1
    (tmp_path / "sweep.jsonl").write_text("[1]\n{}\n")
    with pytest.raises(SettingsError, match="line 1"):
        RowStore(tmp_path, resume=True)


@pytest.mark.parametrize(("change", "error"), [
    ({"heat": 1.0}, "a row has a column 'heat'"), ({"link_gbps": None}, "a row lacks the column 'link_gbps'")])
def test_a_sweep_with_other_columns_is_left_alone(tmp_path: Path, change: dict[str, float | None], error: str) -> None:
    """Another version's rows are not mixed with this one's; a failed row of it goes, as all failed rows do."""
    row = {name: cell for name, cell in (measured() | change).items() if name not in change or cell is not None}
    for failed in (False, True):
        text = json.dumps(row | {"error": "it broke" if failed else None}) + "\n"
        (tmp_path / "sweep.jsonl").write_text(text)
        if failed:
            assert RowStore(tmp_path, resume=True).rows == []
        else:
            with pytest.raises(SettingsError, match=error):
                RowStore(tmp_path, resume=True)
            assert [path.name for path in tmp_path.iterdir()] == ["sweep.jsonl"]
            assert (tmp_path / "sweep.jsonl").read_text() == text


def test_a_sweep_of_which_nothing_was_measured_is_in_nobodys_way(tmp_path: Path) -> None:
    """The corrected line begins anew in the same folder; one measured row is kept from that."""
    store = RowStore(tmp_path, resume=False)
    store.add(measured(1024, error="no such model"))
    again = RowStore(tmp_path, resume=False)
    assert read_csv(tmp_path / "sweep.csv") == []
    again.add(measured(1024))
    again.add(measured(2048, error="it broke"))
    with pytest.raises(SettingsError, match="--resume"):
        RowStore(tmp_path, resume=False)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """--output below a file, and a CSV that is not there or of something else."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="--output"):
        RowStore(tmp_path / "file" / "below", resume=False)
    with pytest.raises(SettingsError, match="No such file"):
        read_csv(tmp_path / "sweep.csv")
    (tmp_path / "sweep.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SettingsError, match="no column"):
        read_csv(tmp_path / "sweep.csv")


@given(st.dictionaries(st.sampled_from(sorted(COLUMNS)), CELLS))
def test_csv_gives_back_what_was_put_in(tmp_path_factory: pytest.TempPathFactory, row: dict[str, str]) -> None:
    """Numbers, truth values, empty cells and text with commas, quotes or spaces."""
    folder = tmp_path_factory.mktemp("csv")
    RowStore(folder, resume=False).add({**row})
    assert read_csv(folder / "sweep.csv") == [{name: row.get(name) for name in COLUMNS}]
    with (folder / "sweep.csv").open(newline="") as file:
        assert [len(cells) for cells in csv.reader(file)] == [len(COLUMNS)] * 2
