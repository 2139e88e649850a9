"""Programs for the benchmark text: Python modules and SQL. They parse; what they would do is nobody's concern."""

from __future__ import annotations

from kvs_core.data.phrases import Dice, Writer, plural

_INDENT = "    "


class _Names:
    """What a function can speak of: names that hold rows, numbers and mappings."""

    def __init__(self, writer: Writer, rows: list[str]) -> None:
        self.writer = writer
        self.rows = rows
        self.numbers: list[str] = []

    @property
    def dice(self) -> Dice:
        return self.writer.dice

    def number(self) -> str:
        """A number's name, or a number."""
        if self.numbers and self.dice.chance(0.7):
            return self.dice.pick(self.numbers)
        return str(self.dice.pick((0, 1, 2, 10, self.dice.between(3, 512))))

    def condition(self, row: str) -> str:
        left = f"{row}.{self.writer.word('attribute')}" if row else self.number()
        sign = self.dice.pick(("<", ">", "==", "<=", "!=", ">="))
        text = f"{left} {sign} {self.number()}"
        if row and self.dice.chance(0.25):
            joined = self.dice.pick(("and", "or", "and not"))
            text += f" {joined} {row}.{self.writer.word('attribute')}"
        return text


def program(writer: Writer) -> str:
    """A Python module: imports, constants, a class, functions."""
    dice = writer.dice
    noun = writer.word("noun")
    imports = [name for name in ("json", "math", "re", "sys", "time", "itertools", "logging") if dice.chance(0.3)]
    parts = [f'"""{writer.capital("act")}."""']
    if imports:
        parts.append("\n".join(f"import {name}" for name in imports))
    parts.append("\n".join(
        f"{'MOST' if dice.chance(0.5) else 'DEFAULT'}_{plural(writer.word('noun')).upper()} = {dice.between(2, 9_000)}"
        for _ in range(dice.between(1, 3))
    ))
    if dice.chance(0.6):
        parts.append(_class(writer, noun))
    parts += [_function(writer, "") for _ in range(dice.between(2, 6))]
    return "\n\n\n".join(parts)


def _class(writer: Writer, noun: str) -> str:
    fields = list(dict.fromkeys(writer.word("attribute") for _ in range(writer.dice.between(2, 5))))
    kinds = {name: writer.dice.pick(("int", "float", "str", "bool", "list[int]")) for name in fields}
    head = f"class {noun.title()}:\n{_INDENT}\"\"\"{writer.capital('np')}.\"\"\""
    init = [
        f"def __init__(self, {', '.join(f'{name}: {kind}' for name, kind in kinds.items())}) -> None:",
        *(f"{_INDENT}self.{name} = {name}" for name in fields),
    ]
    methods = [_function(writer, _INDENT) for _ in range(writer.dice.between(1, 3))]
    return "\n\n".join([head, "\n".join(_INDENT + line for line in init), *methods])


def _function(writer: Writer, indent: str) -> str:
    dice = writer.dice
    rows = plural(writer.word("noun"))
    other = writer.word("attribute")
    own = "self, " if indent else ""
    name = f"{writer.word('verb')}_{dice.pick((rows, writer.word('noun'), f'by_{other}'))}"
    names = _Names(writer, [rows])
    names.numbers.append(other)
    lines = [f"def {name}({own}{rows}, {other}={dice.between(0, 64)}):"]
    if dice.chance(0.6):
        lines.append(f'{_INDENT}"""{writer.capital("act")}."""')
    result = dice.pick(("result", "found", f"total_{writer.word('attribute')}", f"{writer.word('noun')}_list"))
    gathers = not result.startswith("total")
    lines.append(f"{_INDENT}{result} = {'[]' if gathers else '0'}")
    if not gathers:
        names.numbers.append(result)
    for _ in range(dice.between(1, 4)):
        lines += [_INDENT + line for line in _statement(names, result, gathers, "", 0)]
    lines.append(f"{_INDENT}return {dice.pick((result, f'sorted({result})' if gathers else f'{result} / {other}'))}")
    return "\n".join(indent + line for line in lines)


def _statement(names: _Names, result: str, gathers: bool, row: str, depth: int) -> list[str]:
    dice, writer = names.dice, names.writer
    kind = dice.below(8 if depth < 2 else 4)
    if kind == 0:
        value = f"{row}.{writer.word('attribute')}" if row else f"len({dice.pick(names.rows)})"
        return [f"{result}.append({value})" if gathers else f"{result} += {value}"]
    if kind == 1:
        name = f"{dice.pick(('last', 'next', 'old', 'best', 'first'))}_{writer.word('attribute')}"
        operation = dice.pick(("+", "-", "*", "//", "%"))
        line = f"{name} = {names.number()} {operation} {dice.between(1, 99)}"
        names.numbers.append(name)
        return [line]
    if kind == 2:
        return [f'print(f"{writer.line("event").replace("{", "(")}: {{{names.number()}}}")']
    if kind == 3:
        source = dice.pick(names.rows)
        item = writer.word("noun")
        return [f"{plural(item)} = [{item} for {item} in {source} if {names.condition(item)}]"]
    if kind in (4, 5):
        source, item = dice.pick(names.rows), writer.word("noun")
        head, inner = f"for {item} in {source}:", item
    else:
        head, inner = f"if {names.condition(row)}:", row
    body = [line for _ in range(dice.between(1, 2)) for line in _statement(names, result, gathers, inner, depth + 1)]
    lines = [head, *(_INDENT + line for line in body)]
    if head.startswith("if") and dice.chance(0.4):
        lines += ["else:", *(_INDENT + line for line in _statement(names, result, gathers, row, depth + 1))]
    return lines


def query(writer: Writer) -> str:
    """A table in SQL, rows for it and questions about it."""
    dice = writer.dice
    table = f"{plural(writer.word('noun'))}_{dice.between(1, 999)}"
    columns = list(dict.fromkeys(writer.word("attribute") for _ in range(dice.between(3, 6))))
    kinds = {name: dice.pick(("INTEGER", "REAL", "TEXT NOT NULL", "DATE")) for name in columns}
    body = ",\n".join(f"    {name} {kind}" for name, kind in kinds.items())
    head = f"-- {writer.capital('act')}.\nCREATE TABLE {table} (\n    id INTEGER PRIMARY KEY,\n"
    parts = [f"{head}{body}\n);"]
    rows = []
    for _ in range(dice.between(2, 7)):
        values = [
            f"'{writer.word('quality')} {writer.word('thing')}'" if kind.startswith("TEXT")
            else f"'{dice.between(1800, 1936)}-{dice.between(1, 12):02}-{dice.between(1, 28):02}'" if kind == "DATE"
            else str(dice.between(0, 9_999))
            for kind in kinds.values()
        ]
        rows.append(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join(values)});")
    parts.append("\n".join(rows))
    for _ in range(dice.between(1, 3)):
        name, by = dice.pick(columns), dice.pick(columns)
        value = dice.pick(("COUNT(*)", f"SUM({name})", f"MAX({name})", f"AVG({name})"))
        where = f"{name} {dice.pick(('<', '>', '='))} {dice.between(1, 5_000)}"
        limit = dice.between(3, 90)
        parts.append(f"SELECT {by}, {value}\nFROM {table}\nWHERE {where}\nGROUP BY {by} ORDER BY {by} LIMIT {limit};")
    return "\n\n".join(parts)
