"""Tiny random models with a vision tower, their processor's files, and rows of coloured squares."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import torch
import trl
from moefamilies import FAMILIES
from PIL import Image
from tinymoe import byte_tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText

COLORS = {"red": (220, 20, 30), "green": (20, 200, 40), "blue": (30, 40, 230), "white": (240,) * 3}
ASK = "<image>colour?"
TEMPLATES = {"qwen3_vl_moe": "qwen3_vl", "qwen3_5_moe": "qwen3_5_nothink"}
_IMAGE = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor",
    "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
    "size": {"shortest_edge": 1024, "longest_edge": 65536},
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip


def vision_tokenizer(model_type: str) -> Any:
    template = Path(trl.__file__).with_name("chat_templates") / f"{TEMPLATES[model_type]}.jinja"
    return byte_tokenizer(template.read_text(), *_IMAGE, "<|im_start|>", "<|im_end|>")


def vision_base(path: Path, model_type: str, **text: Any) -> Path:
    """A random model in bfloat16 with its tokenizer and processor; ``text`` changes its language model."""
    tokenizer = vision_tokenizer(model_type)
    own = FAMILIES[model_type]
    sizes = {**own["text_config"], "vocab_size": 288, "num_hidden_layers": 2, **text}
    if "layer_types" in sizes:
        sizes["layer_types"] = ["linear_attention", "full_attention"]
    start, end, image, video = (tokenizer.convert_tokens_to_ids(name) for name in _IMAGE)
    config = AutoConfig.for_model(
        model_type, text_config=sizes, vision_config=own["vision_config"], image_token_id=image,
        video_token_id=video, vision_start_token_id=start, vision_end_token_id=end,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # answers that LoRA can make certain
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return path


def square(colour: str, size: int = 32, shade: int = 0) -> Image.Image:
    """A square of one colour; ``shade`` makes it another image of the same."""
    return Image.new("RGB", (size, size), tuple(max(0, part - shade) for part in COLORS[colour]))


def png(image: Image.Image) -> bytes:
    made = io.BytesIO()
    image.save(made, "PNG")
    return made.getvalue()


def data_url(image: Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def colour_rows(directory: Path, shades: range, size: int = 32) -> list[dict[str, Any]]:
    """sharegpt rows that ask for the colour of a file in ``directory``/images."""
    (directory / "images").mkdir(exist_ok=True)
    rows = []
    for shade in shades:
        for colour in COLORS:
            name = f"images/{colour}{shade}.png"
            square(colour, size, shade).save(directory / name)
            talk = [{"from": "human", "value": ASK}, {"from": "gpt", "value": colour}]
            rows.append({"conversations": talk, "images": [name]})
    return rows
