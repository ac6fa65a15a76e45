"""Write the golden files anew: ``python tests/golden/write.py [NAME …]``; prints what changes.

A difference is a change of a contract: it needs a line in CHANGELOG.md.
"""

import os
import sys
import tempfile
import warnings
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[2])]
os.environ["HF_HUB_OFFLINE"] = "1"

from golden.contracts import CONTRACTS  # noqa: E402
from golden.store import difference, files_of, write  # noqa: E402

import ktbridge.sft  # noqa: E402, F401  before torch, as tests/conftest.py


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in CONTRACTS]
    if unknown:
        sys.exit(f"no contract {', '.join(unknown)}; there are: {', '.join(sorted(CONTRACTS))}")
    warnings.simplefilter("ignore")
    for name in names or sorted(CONTRACTS):
        with tempfile.TemporaryDirectory() as place:
            made = files_of(name, Path(place).resolve())
        lines = difference(name, made)
        print("\n".join(lines) if lines else f"{name}: as stored")
        write(name, made)


if __name__ == "__main__":
    main(sys.argv[1:])
