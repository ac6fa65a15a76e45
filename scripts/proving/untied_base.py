"""A copy of a base whose tied output head is stored: SGLang-KT's classes don't tie (KTB969).

    untied_base.py BASE TARGET

The same function: lm_head.weight is the embedding. TARGET appears whole or not at all.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from ktbridge.files.publish import Staging

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WEIGHTS = "model.safetensors"


def main() -> None:
    base, target = map(Path, sys.argv[1:])
    with Staging(target, lambda there: None) as staging:
        others = shutil.ignore_patterns(WEIGHTS)
        shutil.copytree(base, staging.path, dirs_exist_ok=True, ignore=others)
        tensors = load_file(base / WEIGHTS)
        tensors[HEAD] = tensors[EMBEDDING].clone()
        save_file(tensors, staging.path / WEIGHTS, metadata={"format": "pt"})
        config = json.loads((base / "config.json").read_text())
        config["tie_word_embeddings"] = False
        (staging.path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        staging.commit()


if __name__ == "__main__":
    main()
