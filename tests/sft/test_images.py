"""Rows with images: every form, what is refused, what is trained and answered, for tiny models that see."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from PIL import Image
from planshapes import plan_run
from pyarrow import parquet
from safetensors.torch import load_file
from trainrun import quiet, settings, tokenized, train, weights, write_lines, write_run
from transformers import AutoImageProcessor, Qwen3VLProcessor
from visionmoe import (
    ASK,
    COLORS,
    colour_rows,
    data_url,
    png,
    square,
    vision_base,
    vision_tokenizer,
)

from ktbridge.adapter import convert_adapter, read_adapter, validate_adapter
from ktbridge.errors import KtbridgeError, ProblemsError
from ktbridge.experts.load_model import load_tokenizer
from ktbridge.predict.prompts import prepare_predictions
from ktbridge.predict.run import plan_engine, predict
from ktbridge.sft.config import TrainConfig, load_config
from ktbridge.sft.data import describe_rows, load_rows, tokenize_rows
from ktbridge.sft.data.images import load_pixels, read_vision
from ktbridge.sft.plan.inputs import TargetMachine
from ktbridge.sft.plan.lengths import read_lengths

VL = "qwen3_vl_moe"
KINDS = (VL, "qwen3_5_moe")


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    made = tmp_path_factory.mktemp("seeing")
    return {kind: vision_base(made / kind, kind) for kind in KINDS}


def talk(*parts: Any, answer: str = "red") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts]}, {"role": "assistant", "content": answer}]


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def configured(base: Path, *files: Path, **changes: Any) -> TrainConfig:
    return replace(settings(*files, **changes), model_name_or_path=str(base))


def fitted(config: TrainConfig, tokenizer: Any = None) -> Any:
    """The rows as tokens, and what reads their images."""
    base = Path(config.model_name_or_path)
    vision = read_vision(base, config)
    tokenizer = tokenizer or load_tokenizer(base)
    return tokenize_rows(load_rows(config), tokenizer, config, vision=vision), vision


def whys(rows: Any) -> list[str]:
    return [each.why for each in rows.refused]


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_is_what_the_processor_makes(kind, bases, tmp_path, monkeypatch):
    """Tokens, their types and pixels of each spelling of the same rows are those of the model's processor."""
    base, (red, blue) = bases[kind], (square("red", 64), square("blue", 96))
    red.save(tmp_path / "red.png"), blue.save(tmp_path / "blue.png")
    question = [text("Left"), None, text("right"), None, text("same?")]

    def openai(*images: Any) -> dict[str, Any]:
        left = iter(images)
        return {"messages": talk(*(part or next(left) for part in question), answer="no")}

    urls = [{"type": "image_url", "image_url": {"url": data_url(each)}} for each in (red, blue)]
    paths = [{"type": "image", "image": each} for each in ("red.png", "file://blue.png")]
    said, both = "Left<image>right<image>same?", ["red.png", "blue.png"]
    rows = [
        openai(*urls),
        openai(*paths),
        {**openai({"type": "image"}, {"type": "image"}), "images": both},
        row(said, "red.png", str(tmp_path / "blue.png")),
        {"instruction": said, "output": "no", "images": both},
    ]
    file = write_lines(tmp_path / "rows.jsonl", rows)
    stored = [{"bytes": png(each), "path": None} for each in (red, blue)]
    table = {"prompt": [said], "completion": ["no"], "images": [stored]}
    parquet.write_table(pa.table(table), tmp_path / "rows.parquet")
    made, vision = fitted(configured(base, file, tmp_path / "rows.parquet"))
    assert whys(made) == []

    # The processor asks for one of videos, which needs torchvision.
    monkeypatch.setattr(Qwen3VLProcessor, "check_argument_for_proper_class", lambda *_: None)
    tokenizer = vision_tokenizer(kind)
    images = AutoImageProcessor.from_pretrained(base, backend="pil")
    whole = Qwen3VLProcessor(images, tokenizer, None, chat_template=tokenizer.chat_template)
    asked = [part or {"type": "image"} for part in question]
    written = whole.apply_chat_template(talk(*asked, answer="no"), tokenize=False)
    expected = whole(text=[written], images=[red, blue], return_tensors="pt")
    for each in made.dataset:
        assert each["input_ids"] == expected["input_ids"][0].tolist()
        learned = [token for token in each["labels"] if token != -100]
        assert tokenizer.decode(learned) == "no<|im_end|>"
        shown = [vision.images[number] for number in each["image_numbers"]]
        found = vision.inputs(torch.tensor([each["input_ids"]]), shown)
        assert found.keys() == {"pixel_values", "image_grid_thw", "mm_token_type_ids"}
        for name, value in found.items():
            assert torch.equal(value, expected[name]), name


def row(said: str, *images: Any, answer: str = "no", **more: Any) -> dict[str, Any]:
    turns = [{"from": "human", "value": said}, {"from": "gpt", "value": answer}]
    return {"conversations": turns, "images": [*images], **more}


def huge(width: int, height: int) -> bytes:
    """A PNG of a header alone."""
    head = struct.pack(">II5B", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def test_refused(bases, tmp_path):
    """A sentence for each row whose images can't be trained on; the others are used."""
    noise = Image.effect_noise((64, 64), 90).convert("RGB")
    for name, content in {
        "red": png(square("red", 64)), "large": png(square("red", 256)), "text": b"no image",
        "bomb": huge(60_000, 60_000), "line": png(Image.new("RGB", (500, 2))), "cut": png(noise)[:-2000],
    }.items():  # fmt: skip
        (tmp_path / f"{name}.png").write_bytes(content)
    part, away = (
        {"type": "image_url", "image_url": {"url": url}}
        for url in ("data:image/png;base64,@@", "https://example.org/cat.png")
    )
    answer = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<image>"}]
    rows = [
        (row(ASK, "red.png"), None),
        ({"prompt": "here <image> is a word", "completion": "a"}, None),
        (row(ASK), "images without a place of their own: 0 for 1 times <image>"),
        (row(ASK, "red.png", "red.png"), "images without a place of their own: 2 for 1 times <image>"),
        (row("colour?", "red.png"), "images without a place of their own: 1 for 0 times <image>"),
        (row(ASK, "gone.png"), f"an image that isn't there: gone.png, looked for in {tmp_path}"),
        (row(ASK, "."), "an image that isn't a file: ."),
        (row(ASK, "text.png"), "an image that can't be read: text.png: no image in a format that Pillow"),
        (row(ASK, "cut.png"), "an image that can't be read: cut.png: image file is truncated"),
        (row(ASK, "bomb.png"), "an image too large to decode: bomb.png has more than"),
        (row(ASK, "line.png"), "an image that the model's processor refuses: 500 × 2: absolute aspect"),
        (row(ASK, "large.png"), "images beyond cutoff_len=60: they have 64 tokens, fewer with image_max"),
        (row(ASK + "<|image_pad|>", "red.png"), "1 images and 2 tokens for one: the chat template"),
        (row(ASK, "https://example.org/cat.png"), "an image on the network: https://example.org/cat.png;"),
        (row(ASK, 7), "an image without a path, data URL or bytes"),
        (row(ASK, "red.png", videos=["v.mp4"]), "with videos: only text and images are trained on"),
        ({"messages": talk(part)}, "an image that can't be read: a data URL of no base64"),
        ({"messages": talk(away)}, "an image on the network: https://example.org/cat.png;"),
        ({"messages": talk({"type": "image"})}, "an image without a path, data URL or bytes"),
        ({"messages": talk({"type": "video"})}, "content that is not text (video) in a user message"),
        ({"messages": talk({"type": "image", "image": "red.png"}), "images": ["red.png"]},
         "with images twice: as a field and in the messages"),
        ({"messages": answer, "image": "red.png"}, "an image in an answer: only text is learned"),
    ]  # fmt: skip
    file = write_lines(tmp_path / "rows.jsonl", [row for row, _ in rows])
    config = configured(bases[VL], file, cutoff_len=60, allow_refused_rows=True)
    made, _ = fitted(config)
    expected = {f"{file}: line {n}": why for n, (_, why) in enumerate(rows, 1) if why}
    assert {each.where for each in made.refused} == {*expected}
    for each in made.refused:
        assert each.why.startswith(expected[each.where])
    assert made.used == 2
    assert ", 1 with images of 4 tokens;" in describe_rows(made)
    smaller, _ = fitted(replace(config, image_max_pixels=32 * 96))
    assert smaller.used == 3  # the large one, of one token

    assert "images for a model that reads text alone" in whys(tokenized(config, load_tokenizer(bases[VL])))
    for stage, given in (
        ("dpo", {"prompt": ASK, "chosen": "a", "rejected": "b", "images": ["red.png"]}),
        ("dpo", {"prompt": talk(part)[:1], "chosen": "a", "rejected": "b"}),
        ("pt", {"text": ASK, "images": ["red.png"]}),
    ):
        path = write_lines(tmp_path / "o.jsonl", [given])
        with pytest.raises(ProblemsError, match=r"with images: stage|not text \(image_url\)"):
            load_rows(configured(bases[VL], path, stage=stage))


def test_pixels(bases, tmp_path):
    """Orientation and bounds are applied, and a file that changes or goes is named."""
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (96, 32), "red").save(tmp_path / "turned.jpg", exif=turned)
    Image.new("RGBA", (320, 320), (0, 0, 255, 0)).save(tmp_path / "large.png")
    rows = [row(ASK, "turned.jpg"), row(ASK, "large.png")]
    file = write_lines(tmp_path / "rows.jsonl", rows)
    config = configured(bases[VL], file, image_max_pixels=64 * 64, image_min_pixels=32 * 64)
    made, vision = fitted(config)
    sizes = [(picture.width, picture.height) for picture in vision.images]
    assert sizes == [(32, 96), (320, 320)]
    assert load_pixels(vision.images[0]).size == (32, 96)
    assert vision.inputs(torch.zeros(1, 1), vision.images)["image_grid_thw"].tolist() == [
        [1, 6, 2],
        [1, 4, 4],
    ]
    assert vision.count_tokens(vision.images) == [3, 4]
    assert made.image_tokens == 7
    square("blue", 96).save(tmp_path / "large.png")
    (tmp_path / "turned.jpg").unlink()
    for picture, why in zip(vision.images, ("No such file", "has changed"), strict=True):
        with pytest.raises(KtbridgeError, match=f"{picture.name}.*{why}"):
            load_pixels(picture)


@pytest.mark.parametrize("kind", KINDS)
def test_plan_counts_images_and_the_vision_tower(kind, bases, tmp_path):
    shown = write_lines(tmp_path / "shown.jsonl", colour_rows(tmp_path, range(2), 128))
    read = write_lines(tmp_path / "read.jsonl", [row("colour?", answer="green")] * 8)
    tensors = load_file(bases[kind] / "model.safetensors")
    tower = sum(2 * tensor.numel() for name, tensor in tensors.items() if ".visual." in name)
    plans = {}
    for file in (shown, read):
        config = configured(bases[kind], file, per_device_train_batch_size=2, max_steps=1)
        target = TargetMachine(2**34, 2**34, 2**40, 2)
        plans[file] = plan = plan_run(config, target, measure=False)
        sizes = {part.what: part.size for part in plan.parts}
        # Qwen3-VL has no text model without the tower in transformers, so it is always loaded.
        there = file == shown or kind == VL
        assert sizes.get("the vision tower") == (tower if there else None)
        assert ("images in the vision tower" in sizes) == (file == shown)
    assert any("8 images of 128 tokens" in note for note in plans[shown].notes)
    # 16 tokens an image, between two that mark its place.
    assert plans[shown].longest == plans[read].longest + 18


def predicted(directory: Path, name: str, *overrides: str) -> list[str]:
    asked = (
        f"output_dir={directory / name}", f"adapter_name_or_path={directory / 'raw'}", "do_train=false",
        "do_predict=true", "do_sample=false", *overrides,
    )  # fmt: skip
    prepared = prepare_predictions(load_config(directory / "run.yaml", asked))
    assert predict(prepared, plan_engine(prepared)).problems == ()
    found = (directory / name / "generated_predictions.jsonl").read_text().splitlines()
    return [json.loads(line)["predict"] for line in found]


@pytest.mark.slow
@quiet
@pytest.mark.parametrize(
    ("kind", "steps", "rate", "tokens"), [(VL, 66, 0.01, "auto"), ("qwen3_5_moe", 60, 0.006, 256)]
)
def test_learns_colours(kind, steps, rate, tokens, bases, tmp_path):
    """Trained on squares and rows of text, a model names other squares' colours; resumed, it is the same.

    ``tokens``: of a pass; where it is a number, rows of both kinds are sorted into passes.
    """
    said = ("yes", "no") * 4
    rows = [*colour_rows(tmp_path, range(0, 12, 3)), *(row(f"say {w}", answer=w) for w in said)]
    write_lines(tmp_path / "held.jsonl", colour_rows(tmp_path, range(1, 12, 6)))
    write_lines(tmp_path / "said.jsonl", [row("say yes"), row("say no")])
    write_run(
        tmp_path, bases[kind], rows, eval_dataset="held.jsonl", max_steps=steps, save_steps=steps - 6,
        save_total_limit=2, learning_rate=rate, lora_rank=16, cutoff_len=128, seed=1, use_cpu=True,
        per_device_train_batch_size=8, report_to="none", eval_steps=20, tokens_per_pass=tokens,
    )  # fmt: skip
    result = train(tmp_path)
    assert result.last_loss < 0.3 < 4 < result.first_loss
    assert result.held_out.last_loss < 0.3
    raw, first = tmp_path / "raw", weights(tmp_path / "raw")
    assert not [name for name in read_adapter(raw).nonexpert_keys() if "visual" in name]
    assert predicted(tmp_path, "seen") == [*COLORS] * 2
    # The text model alone has the same adapter, as the embedded engine serves it.
    assert predicted(tmp_path, "said", f"eval_dataset={tmp_path / 'said.jsonl'}") == ["yes", "no"]
    convert_adapter(raw, merged_output_dir=tmp_path / "merged", base_model=str(bases[kind]))
    for made in (raw, tmp_path / "merged"):
        assert validate_adapter([made], base_model=bases[kind]).problems == []

    shutil.rmtree(raw)
    shutil.rmtree(tmp_path / f"raw.checkpoints/checkpoint-{steps}")
    assert train(tmp_path).first_step == steps - 5
    assert weights(raw) == first

    square("white").save(tmp_path / "images/red0.png")
    with pytest.raises(KtbridgeError, match="rows"):  # with another image it is another run
        train(tmp_path, "max_steps=70", "resume_from_checkpoint=true", "overwrite_output_dir=true")


def test_an_answer_behind_an_image_too_many_is_never_left_out_in_silence(bases, tmp_path):
    """Where each answer has a sequence of its own, the row is refused, though its first answer would fit."""
    for side in (64, 256):
        square("red", side).save(tmp_path / f"{side}.png")
    first, last = (row(ASK, name)["conversations"] for name in ("64.png", "256.png"))
    both = {"conversations": [*first, *last], "images": ["64.png", "256.png"]}
    file = write_lines(tmp_path / "rows.jsonl", [both, row(ASK, "64.png")])
    tokenizer = load_tokenizer(bases[VL])
    tokenizer.chat_template += "{{ 'x' if messages[-1].role == 'assistant' and messages | length == 2 }}"
    (whole, _), (found, _) = (
        fitted(configured(bases[VL], file, cutoff_len=most), tokenizer) for most in (500, 60)
    )
    assert (whole.used, len(whole.dataset)) == (2, 3)
    assert (found.used, len(found.dataset), found.cut) == (1, 1, 0)
    assert [why.partition(":")[0] for why in whys(found)] == ["images beyond cutoff_len=60"]


def test_a_mixture_of_images_has_the_same_number_of_rows_in_the_plan(bases, tmp_path):
    for side in (64, 256):
        square("red", side).save(tmp_path / f"{side}.png")
    shown = [row(ASK, "256.png")] * 6 + [row(ASK, "64.png")] * 2
    files = [
        write_lines(tmp_path / "shown.jsonl", shown),
        write_lines(tmp_path / "read.jsonl", [row("colour?")] * 5),
    ]
    config = configured(
        bases[VL], *files, cutoff_len=60, allow_refused_rows=True,
        mix_strategy="interleave_over", interleave_probs=(0.5, 0.5),
    )  # fmt: skip
    found, _ = fitted(config)
    assert [(share.usable, share.distinct) for share in found.shares] == [(2, 2), (5, 5)]
    assert read_lengths(config, bases[VL]).sequences == len(found.dataset)
