"""Runs on rows of other forms than plain conversations: raw text, tools and thoughts."""

from findings import codes
from tinymoe import tiny_tokenizer
from trainrun import log_of, quiet, text, train, write_run

from ktbridge.sft.config import load_config
from ktbridge.sft.prepare import prepare

pytestmark = quiet


def test_raw_text_is_packed_and_trained(tmp_path, base_dir):
    rows = [{"text": text(0, 40)}, {"text": text(3, 7)}, {"text": text(5, 9)}] * 4
    run = write_run(
        tmp_path, base_dir, rows, stage="pt", cutoff_len=16, val_size=2, max_steps=3, save_steps=0,
        learning_rate=1e-2, per_device_train_batch_size=4, kt_config={"kt_num_threads": 2},
    )  # fmt: skip
    config = load_config(run / "run.yaml")
    assert config.packing
    result = train(run)
    log = log_of(tmp_path / "raw")
    losses = [record["loss"] for record in log if "loss" in record]
    held = [record["eval_loss"] for record in log if "eval_loss" in record]
    assert losses[-1] < losses[0]
    assert held[-1] < held[0]
    assert (result.used, result.cut, result.refused) == (10, 0, 0)


def test_tools_and_thoughts_reach_the_run_and_its_preview(tmp_path, base_dir):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% if tools %}the {{ tools[0].function.name }} {% endif %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}i am {{ '<think> ' + m.reasoning_content + ' </think> ' "
        "if m.reasoning_content is string }}{{ m.content }}{% for c in m.tool_calls or () %}"
        "say {{ c.function.name }} {{ c.function.arguments.sky }}{% endfor %} {{ eos_token }} "
        "{% else %}you {{ m.content }} {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}i am{% endif %}"
    )
    base = tmp_path / "base"
    base.mkdir()
    for file in base_dir.iterdir():
        (base / file.name).symlink_to(file)
    for name in ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json"):
        (base / name).unlink(missing_ok=True)
    tokenizer.save_pretrained(base)
    call = {"function": {"name": "blue", "arguments": {"sky": "yes"}}}
    row = {
        "tools": [{"name": "blue"}],
        "messages": [
            {"role": "user", "content": "who"},
            {"role": "assistant", "content": "", "tool_calls": [call], "reasoning": "hello"},
            {"role": "tool", "content": "nya"},
            {"role": "assistant", "content": "meow"},
        ],
    }
    run = write_run(tmp_path, base, [row] * 2, max_steps=1, save_steps=0, enable_thinking="auto")
    ready = prepare(load_config(run / "run.yaml"))
    learned = [part for part, yes in ready.fitted.preview["sequence"] if yes]
    assert " ".join(learned[0].split()[-4:]).startswith("say blue yes")
    assert ready.fitted.with_thoughts == 2
    assert "KTD021" in codes(ready.fitted.notes)
