"""``ktbridge convert``: convert an adapter into serving directories or another format."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from ktbridge.adapter.convert import execute_plan, plan_convert
from ktbridge.adapter.formats import loaded_by
from ktbridge.cli._app import Command, dry_run_option, json_option, output_option, terminable
from ktbridge.cli._hub import ensure_model
from ktbridge.cli._ui import console, emit_json, print_problems, progress_bar, shown, stderr
from ktbridge.errors import KtbridgeError

if TYPE_CHECKING:
    from ktbridge.adapter.convert import ConvertPlan, ConvertReport

_KT_FORMATS = ("kt-split", "kt-merged", "raw")
_NUMERIC = ("tensors", "bytes", "rank", "alpha")


@click.command(cls=Command)
@click.argument("raw_dir", type=click.Path(), metavar="DIR")
@click.option("--expert-output-dir", metavar="DIR", help="Write the expert LoRA here (split layout).")
@click.option("--nonexpert-output-dir", metavar="DIR", help="Write everything else here (split).")
@click.option("--merged-output-dir", metavar="DIR", help="Write one directory with both halves.")
@click.option(
    "--to",
    "to",
    default="kt-split",
    show_default=True,
    metavar="FORMAT",
    help="kt-split, kt-merged, raw, peft-fused, vllm, sglang-3d or gguf.",
)
@click.option(
    "--from",
    "from_format",
    default="auto",
    show_default=True,
    metavar="FORMAT",
    help="The format of DIR if it is ambiguous: any of --to, unsloth-legacy, peft-0.18, "
    "megatron-packed, mcore or mlx.",
)
@output_option("output_dir", "Write a format here that is one directory (not kt-split).")
@click.option(
    "--base-model",
    "--base-model-name-or-path",
    "base_model",
    metavar="DIR",
    help="The base model to name in the configurations, a directory or a Hub id.  [default: what DIR names]",
)
@click.option(
    "--lora-alpha",
    type=float,
    metavar="A",
    help="The alpha the experts were trained with.  [default: the manifest's, else the config's]",
)
@click.option(
    "--dtype",
    default="keep",
    show_default=True,
    metavar="keep|bf16|f32",
    help="bf16 rounds wider tensors to bfloat16; f32 widens all, to hold scales that differ.",
)
@click.option(
    "--unwrap", is_flag=True, help="Take wrappers' names (_orig_mod, module and the like) out of keys."
)
@click.option("--overwrite", is_flag=True, help="Replace output directories that hold an adapter.")
@dry_run_option("Print what would be written; write nothing.")
@json_option("Print one JSON document.")
def command(raw_dir: str, overwrite: bool, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Turn the adapter in DIR into serving directories, in one pass over it.

    Tensor bytes stay as they are. Each output is complete or as it was before, whatever happens.
    Name one output at least. With --to and --from, adapters go to and come from PEFT, vLLM,
    SGLang and llama.cpp; what a format can't hold exactly is refused with the reason, and so is an
    adapter whose files don't match its manifest.
    """
    if options["base_model"] is not None and options["to"] not in _KT_FORMATS:
        with suppress(KtbridgeError):  # its config.json helps, its name suffices
            ensure_model(options["base_model"], weights=False)
    plan = plan_convert(raw_dir, overwrite=overwrite, **options)
    if dry_run:
        if as_json:
            emit_json({"ok": True, **plan.as_dict()})
        else:
            print_problems(plan.findings)
            _print_summary(plan.as_dict(), options)
            stderr.print("dry run: nothing was written")
        return
    report = None
    try:
        with terminable(), progress_bar("converting", "bytes") as on_progress:
            report = execute_plan(plan, on_progress)
    except KeyboardInterrupt as stop:
        if report is None:
            raise
        raise type(stop)("every output is in place") from stop
    if as_json:
        emit_json({"ok": True, **report.as_dict()})
        return
    print_problems(report.findings)
    _print_summary(report.as_dict(), options)
    step = _next(raw_dir, report, {**options, "base_model": _base_here(plan, options)})
    text = f"done in {report.seconds:.2f} s; {step}"
    stderr.print(text, soft_wrap=True, markup=False)


def _base_here(plan: ConvertPlan, options: Mapping[str, Any]) -> str | None:
    """The base model to validate against: as it was given, else the adapter's own if that is a directory."""
    named: str | None = options["base_model"] or plan.source.base_model
    known = options["base_model"] or (named and os.path.isfile(os.path.join(named, "config.json")))
    return named if known else None


def _typed(output: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """An output's directory as it was typed."""
    given: str | None = options.get(f"{output['layout']}_output_dir") or options["output_dir"]
    return given or str(output["path"])


def _next(raw_dir: str, report: ConvertReport, options: Mapping[str, Any]) -> str:
    """The command that validates the output, and the tools that load a foreign format."""
    to = options["to"]
    loaded = "" if to in _KT_FORMATS else f"for {loaded_by(to)}; "
    checked = [_typed(output, options) for output in report.outputs]
    # The source is validated with them if it can be their reference: if it isn't in one of KT's layouts that
    # was written, too, and has everything requested.
    halved = any(finding.code == "KTB704" for finding in report.findings)
    if report.layout not in {output["layout"] for output in report.outputs} and not halved:
        checked.insert(0, raw_dir)
    more = [] if options["base_model"] is None else ["--base-model", options["base_model"]]
    if options["from_format"] != "auto" and raw_dir in checked:
        more += ["--from", options["from_format"]]
    engine = {"vllm": "vllm", "sglang-3d": "sglang"}.get(to)
    more += ["--engine", engine] if engine is not None else []
    return loaded + "next: " + shlex.join(["ktbridge", "validate", *checked, *more])


def _print_summary(report: dict[str, Any], options: Mapping[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "tensors", "bytes", "rank", "alpha", "modules", "directory"):
        table.add_column(title, justify="right" if title in _NUMERIC else "left", overflow="fold")
    table.add_row(
        f"in ({report['layout']})",
        f"{report['tensors_in']:,}",
        f"{report['bytes_in']:,}",
        "",
        "",
        "",
        shown(str(report["source"])),
    )
    for output in report["outputs"]:
        table.add_row(
            output["layout"],
            f"{output['tensors']:,}",
            f"{output['bytes']:,}",
            str(output["rank"]),
            f"{output['alpha']:g}",
            shown(" ".join(output["target_modules"])),
            shown(_typed(output, options)),
        )
    console.print(table)
