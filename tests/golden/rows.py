"""Twenty training rows of every form, and the chat template that they are written by."""

from __future__ import annotations

from typing import Any

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t.function.name }} {% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content is string %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or () %}<call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</call>{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
"""In the manner of Qwen3: tools, thoughts, and a prompt that can close them."""
SPECIAL = ("<|im_start|>", "<|im_end|>")

ASK = {"role": "user", "content": "who are you?"}
TELL = {"role": "assistant", "content": "i am a cat"}
MORE = [{"role": "user", "content": "and now? 🐱"}, {"role": "assistant", "content": "still one"}]
SYSTEM = {"role": "system", "content": "be brief"}
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLING = [
    ASK,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    TELL,
]
TOOLS = [{"type": "function", "function": TOOL}]
THINKING = [ASK, {**TELL, "reasoning_content": "a cat, i think"}]
HUMAN = {"from": "human", "value": "who?"}

Row = tuple[dict[str, Any], dict[str, Any]]
"""A row, and the settings that it is read with."""
ROWS: dict[str, Row] = {
    "messages": ({"messages": [ASK, TELL]}, {}),
    "system": ({"messages": [SYSTEM, ASK, TELL]}, {}),
    "multi-turn": ({"messages": [ASK, TELL, *MORE]}, {}),
    "multi-turn, history masked": ({"messages": [ASK, TELL, *MORE]}, {"mask_history": True}),
    "multi-turn, prompt learned": ({"messages": [ASK, TELL, *MORE]}, {"train_on_prompt": True}),
    "multi-turn, weights": ({"messages": [ASK, {**TELL, "weight": 0}, *MORE]}, {}),
    "cut": ({"messages": [ASK, TELL, *MORE]}, {"cutoff_len": 60}),
    "alpaca": ({"instruction": "say", "input": "this", "output": "that"}, {}),
    "alpaca, history": (
        {"instruction": "b", "output": "c", "system": "s", "history": [["q", "r"]]},
        {},
    ),
    "sharegpt": ({"conversations": [HUMAN, {"from": "gpt", "value": "a cat"}], "system": "s"}, {}),
    "prompt and completion": ({"prompt": "say", "completion": "that"}, {}),
    "tools": ({"messages": CALLING, "tools": TOOLS}, {}),
    "tools, sharegpt": (
        {
            "conversations": [
                HUMAN,
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "two"},
            ],
            "tools": '[{"name": "add"}]',
        },
        {},
    ),
    "thoughts": ({"messages": THINKING}, {}),
    "thoughts, asked for": ({"messages": THINKING}, {"enable_thinking": True}),
    "thoughts, off": ({"messages": THINKING}, {"enable_thinking": False}),
    "no thoughts, off": ({"messages": [ASK, TELL]}, {"enable_thinking": False}),
    "pair": ({"prompt": [ASK], "chosen": [TELL], "rejected": [MORE[1]]}, {"stage": "dpo"}),
    "judged": ({"messages": [ASK, TELL], "kto_tag": False}, {"stage": "kto"}),
    "raw text": ({"text": "the sky is blue"}, {"stage": "pt"}),
}
PACKED = ("messages", "alpaca", "multi-turn", "tools")
"""Rows that are packed together as well."""
