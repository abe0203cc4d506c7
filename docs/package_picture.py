"""Draw the packages of src/realrl and their imports: docs/images/packages.svg.

Usage: python docs/package_picture.py
"""

import ast
import re
from itertools import permutations
from pathlib import Path
from random import Random
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
SOURCES = HERE.parent / "src" / "realrl"
PICTURE = HERE / "images" / "packages.svg"
COLUMNS, COLUMN_WIDTH, ROW_HEIGHT = 4, 340, 98
BOX_WIDTH, BOX_HEIGHT = 300, 62
WIDTH = COLUMNS * COLUMN_WIDTH
LETTER = 6.3
"""Width of a letter of the small text, in pixels."""

STYLE = """
text { font: 12px system-ui, sans-serif; fill: #444; text-anchor: middle }
.name { font-size: 15px; font-weight: 600; fill: #111 }
rect { fill: #fff; stroke: #777; rx: 6px }
.light rect { fill: #eaf3ea; stroke: #5a8a5a }
path { fill: none; stroke: #999; marker-end: url(#tip) }
"""


def read_table() -> dict[str, tuple[str, bool]]:
    """Read the top-level packages of docs/architecture.md: name -> (contents, whether it never imports torch)."""
    text = (HERE / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)/`( ○)? \| (.*) \|$", text, flags=re.MULTILINE)
    return {name: (contents.replace("`", ""), bool(light)) for name, light, contents in rows}


def find_imports() -> dict[str, set[str]]:
    """Find which packages the modules of each package import, inside functions too."""
    imports: dict[str, set[str]] = {}
    for path in sorted(SOURCES.glob("*/**/*.py")):
        package = path.relative_to(SOURCES).parts[0]
        found = imports.setdefault(package, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("realrl."):
                found.add(str(node.module).split(".")[1])
        found.discard(package)
    # `algorithms` imports data/batch.py, which depends on nothing. Without this line, imports would form a cycle
    # (tests/test_imports.py allows no other).
    imports["algorithms"].discard("data")
    return imports


def assign_rows(imports: dict[str, set[str]]) -> dict[str, int]:
    """Assign each package to a row: 0 if it imports nothing, otherwise one above the highest of its imports."""
    rows: dict[str, int] = {}

    def row(package: str) -> int:
        if package not in rows:
            rows[package] = 1 + max((row(other) for other in sorted(imports[package])), default=-1)
        return rows[package]

    for package in sorted(imports):
        row(package)
    return rows


def drop_implied(imports: dict[str, set[str]]) -> list[tuple[str, str]]:
    """List the imports that do not follow from others: a -> c is left out if a -> b and b -> c exist."""

    def reach(package: str) -> set[str]:
        return imports[package].union(*(reach(other) for other in imports[package]))

    return [
        (package, other)
        for package in sorted(imports)
        for other in sorted(imports[package])
        if not any(other in reach(between) for between in imports[package] - {other})
    ]


def choose_columns(rows: dict[str, int], edges: list[tuple[str, str]]) -> dict[str, int]:
    """Choose a column for every package, so that few arrows pass behind boxes and most are short."""
    members = [
        [package for package in rows if rows[package] == number] for number in sorted(set(rows.values()))
    ]

    def cost(columns: dict[str, int]) -> float:
        total = 0.0
        for package, other in edges:
            x, to_x, length = columns[package], columns[other], rows[package] - rows[other]
            total += abs(x - to_x)
            for between in rows:
                passed = rows[package] - rows[between]
                if 0 < passed < length and abs(x + (to_x - x) * passed / length - columns[between]) <= 0.5:
                    total += 10
        return total

    # Coordinate descent, one row after the other. It starts many times, because each ends in a local optimum.
    random, results = Random(0), []
    for _ in range(100):
        columns = {package: random.randrange(COLUMNS) for package in rows}
        for row in members * 4:
            options = []
            for chosen in permutations(range(COLUMNS), len(row)):
                columns.update(zip(row, chosen, strict=True))
                options.append((cost(columns), chosen))
            columns.update(zip(row, min(options)[1], strict=True))
        results.append((cost(columns), columns))
    return min(results, key=lambda result: result[0])[1]


def wrap(text: str) -> list[str]:
    """Divide text into at most two lines that fit into a box."""
    limit = int((BOX_WIDTH - 16) / LETTER)
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) + 1 > limit:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines[:2] if len(lines) <= 2 else [lines[0], lines[1][: limit - 2] + " …"]


def draw() -> str:
    """Draw the picture as the text of an SVG file."""
    table, imports = read_table(), find_imports()
    rows = assign_rows(imports)
    edges = drop_implied(imports)
    columns = choose_columns(rows, edges)
    top = max(rows.values())
    corners = {
        package: (20 + COLUMN_WIDTH * columns[package], 20 + ROW_HEIGHT * (top - row))
        for package, row in rows.items()
    }
    height = 20 + (top + 1) * ROW_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7"'
        ' orient="auto"><path d="M0 0L8 4L0 8z" style="fill:#999;stroke:none;marker-end:none"/></marker></defs>',
    ]
    for package, other in edges:
        (x, y), (to_x, to_y) = corners[package], corners[other]
        x, y, to_x = x + BOX_WIDTH / 2, y + BOX_HEIGHT, to_x + BOX_WIDTH / 2
        bend = min(30.0, (to_y - y) / 2)
        curve = f"M{x:.0f} {y:.0f}C{x:.0f} {y + bend:.0f} {to_x:.0f} {to_y - bend:.0f} {to_x:.0f} {to_y:.0f}"
        parts.append(f'<path id="{package}-{other}" d="{curve}"/>')
    for package, (x, y) in corners.items():
        contents, light = table[package]
        parts.append(f'<g class="{"light" if light else "heavy"}" transform="translate({x:.0f} {y:.0f})">')
        parts.append(f'<rect width="{BOX_WIDTH}" height="{BOX_HEIGHT}"/>')
        parts.append(f'<text class="name" x="{BOX_WIDTH // 2}" y="19">{package}</text>')
        for number, line in enumerate(wrap(contents)):
            parts.append(f'<text x="{BOX_WIDTH // 2}" y="{36 + 15 * number}">{escape(line)}</text>')
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    print(f"{PICTURE.relative_to(HERE.parent)}: {len(read_table())} packages")
