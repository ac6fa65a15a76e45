#!/usr/bin/env python3
"""KTransformers' converter script, by its own command line, on `ktbridge convert`.

    scripts/convert_kt_to_sglang_adapter.py TRAINING_OUTPUT MERGED --base-model-name-or-path B
        [--lora-alpha A] [--expert-output-dir E] [--nonexpert-output-dir N] [--overwrite]

It takes the place of kt-kernel/scripts/convert_kt_to_sglang_adapter.py in existing pipelines. What
differs: non-expert keys keep PEFT's `base_model.model.`, a directory that isn't an adapter is never
overwritten, and what would be served wrongly is refused. `ktbridge convert --help` has more.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def parse_args() -> argparse.Namespace:
    """The reference script's arguments."""
    parser = argparse.ArgumentParser(description="Convert a KT-SFT output for SGLang-KT.")
    parser.add_argument("input_dir", help="the training output")
    parser.add_argument("output_dir", help="where the merged adapter goes")
    parser.add_argument("--base-model-name-or-path", required=True, help="named in the configs")
    parser.add_argument("--lora-alpha", type=float, help="where adapter_config.json has none")
    parser.add_argument("--expert-output-dir", help="where the expert half goes")
    parser.add_argument("--nonexpert-output-dir", help="where everything else goes")
    parser.add_argument("--overwrite", action="store_true", help="replace existing adapters")
    return parser.parse_args()


def main() -> None:
    """Hand the arguments on."""
    args = parse_args()
    options = {
        "merged-output-dir": args.output_dir,
        "base-model-name-or-path": args.base_model_name_or_path,
        "expert-output-dir": args.expert_output_dir,
        "nonexpert-output-dir": args.nonexpert_output_dir,
        "lora-alpha": args.lora_alpha,
    }
    if args.lora_alpha is not None and (said := configured_alpha(Path(args.input_dir))) is not None:
        # `ktbridge convert --lora-alpha` overrides; pipelines count on the script's not doing so.
        print(f"adapter_config.json says lora_alpha {said}: --lora-alpha is not used", file=sys.stderr)
        del options["lora-alpha"]
    command = [f"--{name}={value}" for name, value in options.items() if value is not None]
    command += ["--overwrite"] if args.overwrite else []

    from ktbridge.cli import main as ktbridge

    ktbridge(args=["convert", *command, "--", args.input_dir], prog_name="ktbridge")


def configured_alpha(directory: Path) -> object:
    """lora_alpha as the configuration gives it; None where there is none to be read."""
    from ktbridge.errors import KtbridgeError
    from ktbridge.model.jsonfile import read_json_file

    try:
        return read_json_file(directory.expanduser() / "adapter_config.json").get("lora_alpha")
    except KtbridgeError:
        return None


if __name__ == "__main__":
    main()
