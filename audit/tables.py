"""The tables that the audit writes into the docs."""

import collections
import json
import os
from pathlib import Path

HERE = Path(__file__).parent
ON_GPU = os.environ.get("AUDIT_DEVICE") == "gpu"
BUILD = HERE.parent / "build" / ("audit_gpu" if ON_GPU else "audit")
KINDS = ("ops", "layers")
MODES = ("eager", "captured")
VERDICTS = ("right", "replicated", "wrong")
HOW = """\
Rows are layouts on a mesh of 2 x 2: each dim sharded over one axis or both, evenly and unevenly,
two dims, pending sums; one input at a time and all alike. Floats are float32, and with fewer
layouts bfloat16 and int32 where one device takes them. Each cell reads *right / replicated /
wrong*. Right: values, gradients and state are those of one device. Replicated: they are, but an op
had no way to work on shards, so its inputs were gathered and a warning said so. A call that one
device can't capture runs eagerly and counts as that. Collectives and bytes are the most that a call
with its gradients takes, eager and captured, for inputs of 20 to 500 numbers.
"""
INTRODUCTIONS = {
    "ops": f"# Every function of keras.ops on a mesh\n\nWritten by `make audit`.\n\n{HOW}",
    "layers": f"""\
# Every layer of keras.layers on a mesh

Written by `make audit`.

{HOW}
Each layer has its variables replicated and, where it has some, each of them sharded on its last
even dim. Random layers draw what a mesh of one draws.
""",
}


def rows_of(kind: str, mode: str) -> list[dict]:
    path = BUILD / f"{kind}_{mode}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def verdict(row: dict) -> str:
    return "wrong" if row["wrong"] else "replicated" if row["replicated"] else "right"


def write(kind: str) -> None:
    (HERE.parent / "docs" / f"{kind}.md").write_text(table(kind))


def table(kind: str) -> str:
    """All rows of a kind by name, as Markdown."""
    what = "function" if kind == "ops" else "layer"
    lines = [
        INTRODUCTIONS[kind],
        f"| {what} | dtypes | eager | captured | collectives | bytes |",
        "| --- | --- | --: | --: | --: | --: |",
    ]
    by_name: dict = collections.defaultdict(lambda: {mode: [] for mode in MODES})
    for mode in MODES:
        for row in rows_of(kind, mode):
            by_name[row["name"]][mode].append(row)
    lines += [_line(name, found) for name, found in sorted(by_name.items())]
    lines += ["", *_totals(by_name), "", *_replicated(by_name), "", *_left_out(kind)]
    return "\n".join(lines).rstrip() + "\n"


def _line(name: str, found: dict[str, list[dict]]) -> str:
    every = [row for rows in found.values() for row in rows]
    dtypes = ", ".join(sorted({row["dtype"] for row in every}))
    cells = [_counts(found[mode]) for mode in MODES]
    for key in ("collectives", "bytes"):
        cells.append(
            ", ".join(str(max((r[key] for r in found[m]), default="")) for m in MODES if found[m])
        )
    return f"| `{name}` | {dtypes} | " + " | ".join(cells) + " |"


def _counts(rows: list[dict]) -> str:
    verdicts = collections.Counter(map(verdict, rows))
    return " / ".join(str(verdicts[v]) for v in VERDICTS) if rows else ""


def _totals(by_name: dict) -> list[str]:
    lines = []
    for mode in MODES:
        rows = [row for found in by_name.values() for row in found[mode]]
        if rows:
            graphs = sum(row["captured"] for row in rows)
            as_graphs = f", {graphs:,} of them as graphs" if graphs else ""
            lines.append(f"- {mode}: {len(rows):,} rows{as_graphs}: {_counts(rows)}")
    return lines


def _replicated(by_name: dict) -> list[str]:
    """The ops behind replicated rows, and why they have no other way."""
    users: dict[str, set] = collections.defaultdict(set)
    for name, found in by_name.items():
        for row in (row for mode in MODES for row in found[mode]):
            for op in row["replicated"]:
                users[op].add(name)
    if not users:
        return []
    lines = ["What runs replicated, and why:", ""]
    for op, names in sorted(users.items()):
        why = REASONS.get(op.removeprefix("aten.").split(".")[0], "no rule yet")
        lines.append(f"- `{op}`: {why} ({', '.join(f'`{n}`' for n in sorted(names))})")
    return lines


# Why an op has no way to work on shards, for layouts in which it has none.
REASONS = {
    "view": "a dim whose shards are not of one size is merged with another, or split",
    "_unsafe_view": "a dim whose shards are not of one size is merged with another, or split",
    "index": "how many elements a mask selects depends on all of it",
    "index_put": "writes by a mask, which may name elements on any rank",
    "index_put_": "writes by a mask, which may name elements on any rank",
    "_unique2": "how many there are, and which, depends on all numbers",
    "nonzero": "how many there are depends on all numbers",
    "bincount": "in a graph: how many counts there are depends on the numbers",
    "linalg_lstsq": "every number of the result depends on all of the matrix",
    "add_": "what is added lies otherwise than the tensor that it is added to",
    "as_strided": "a window may reach over the borders of shards",
}


def _left_out(kind: str) -> list[str]:
    if kind == "ops":
        return []
    from layer_cases import WITHOUT_TENSORS

    return ["Not tensor layers:", "", *(f"- `{n}`: {why}" for n, why in WITHOUT_TENSORS.items())]
