"""What quantizing and dequantizing scripts share: do what was planned, and say what was done."""

from __future__ import annotations

from ktbridge.adapter.requantize import Plan, execute
from ktbridge.errors import ProblemsError


def run(plan: Plan, label: str, dry_run: bool, as_json: bool) -> None:
    """Check the place, do the work under a progress bar, and say what was done."""
    from ktbridge.cli._app import terminable
    from ktbridge.cli._ui import emit_json, progress_bar, stderr
    from ktbridge.files.sizes import size_text

    if problems := list(plan.rewrite.problems(plan.need)):
        raise ProblemsError(f"{plan.rewrite.output} can't be written", problems)
    if dry_run:
        report = plan.as_dict()
    else:
        with terminable(), progress_bar(label, "bytes") as bar:
            report = execute(plan, bar)
    if as_json:
        emit_json({"ok": True, "dry_run": dry_run, **report})
        return
    left_out = plan.rewrite.left_out
    if left_out:
        stderr.print(f"left out: {' '.join(left_out)}", soft_wrap=True, markup=False)
    tail = "dry run: nothing was written" if dry_run else f"done in {report['seconds']:.2f} s"
    source = sum(file.size for file in map(plan.rewrite.checkpoint.file, plan.rewrite.checkpoint.shards))
    stderr.print(
        f"{plan.converted:,} weights, {size_text(source)} to {size_text(plan.bytes)} in "
        f"{report['shards']} shards, {report['output']}; {tail}",
        soft_wrap=True,
        markup=False,
    )
