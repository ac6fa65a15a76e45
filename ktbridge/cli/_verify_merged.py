"""`ktbridge verify --merged`: compare a merged checkpoint with its base and an adapter."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn


def run_merged(
    merged: str, base_model: str, adapter_dir: str | None, from_format: str, html: str | None, as_json: bool
) -> NoReturn:
    """Print what was found, write the page, and exit: with 0 only if the verdict is right."""
    # Each worker multiplies by itself: BLAS with threads of its own would only get in its way.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from ktbridge.adapter import open_adapter
    from ktbridge.cli._hub import ensure_model
    from ktbridge.cli._ui import emit_json, print_blocks, print_problems, print_readings, progress_bar, stderr
    from ktbridge.errors import KtbridgeError
    from ktbridge.files.publish import write_text
    from ktbridge.verify.merge_check import check_merge
    from ktbridge.verify.merge_page import render_merge_page
    from ktbridge.verify.merge_verdict import as_dict, build_blocks, judge_merge

    ensure_model(base_model)
    with suppress(KtbridgeError):  # a path that isn't there is named by the comparison
        ensure_model(merged)
    adapter = None
    if adapter_dir is not None:
        adapter = open_adapter(adapter_dir, from_format, base_model)
        print_readings([adapter.reading])
    with progress_bar("comparing", "bytes") as on_progress:
        check = check_merge(base_model, merged, adapter, on_progress)
    verdict = judge_merge(check)
    if as_json:
        emit_json(as_dict(check, verdict))
    else:
        print_blocks(build_blocks(check, verdict))
    print_problems(verdict.problems)
    if html is not None:
        write_text(Path(html), render_merge_page(check, verdict))
        stderr.print(f"wrote {html}", markup=False, soft_wrap=True)
    sys.exit(0 if verdict.ok else 1)
