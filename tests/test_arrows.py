"""Rooms import what lies below them, and nothing above or beside: also inside functions and for types."""

import ast
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import ktbridge

ROOT = Path(ktbridge.__file__).parent
# From the ground up. What shares a line doesn't import each other, but for the ground itself.
FLOORS = (
    "__init__ _kernels errors codes document files install machine server_api kernel_choice schemas",
    "model",
    "adapter",
    "experts",
    "sft serve verify eval recipe",
    "demo predict gate",
    "cli",
    "__main__",
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms.split()}


def imported(file: Path) -> Iterator[tuple[int, str]]:
    """Line and room of each import from ktbridge; what isn't a room is a name of ktbridge's own."""
    package = ".".join(("ktbridge", *file.relative_to(ROOT).parent.parts))
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            names = [f"{source}.{alias.name}" for alias in node.names]
        for name in names:
            parts = [*name.split("."), "__init__"]
            if parts[0] == "ktbridge":
                yield node.lineno, parts[1] if parts[1] in FLOOR else "__init__"


def test_every_import_goes_down() -> None:
    wrong = []
    for file in sorted(ROOT.rglob("*.py")):
        place = file.relative_to(ROOT)
        own = place.parts[0].removesuffix(".py")
        assert own in FLOOR, f"{own} has no floor: give it one above"
        for line, room in imported(file):
            if room != own and FLOOR[room] >= max(FLOOR[own], 1):
                wrong.append(f"ktbridge/{place}:{line} imports {room}")
    assert not wrong, "\n".join(wrong)
