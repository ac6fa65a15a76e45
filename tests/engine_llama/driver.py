"""Runs in llama_cpp's own environment: prompt logprobs of one GGUF model, with or without an adapter.

Argument: JSON with model, lora (a path or null), scale, prompts (token ids, or texts that are tokenized with
special tokens). Answer: JSON on stdout: tokens, the ids of each prompt, and logprobs, a list for each
prompt's tokens but the first. Exit code 3 for what llama.cpp refuses; its log is stderr.
"""

import json
import sys

import numpy as np
from llama_cpp import GGML_TYPE_F32, Llama, llama_cpp

default_params = llama_cpp.llama_model_default_params


def params_as_stored():
    """llama.cpp's parameters, with weights in memory as in the file.

    Its products of repacked Q4_1 weights on AMX end with SIGILL on virtual machines that show AMX (0.3.36).
    """
    params = default_params()
    params.use_extra_bufts = False
    return params


llama_cpp.llama_model_default_params = params_as_stored
asked = json.loads(sys.argv[1])
try:
    # The cache in float32 as well: what is left of rounding is then llama.cpp's products alone.
    llama = Llama(
        asked["model"], n_ctx=256, n_threads=1, n_threads_batch=1, logits_all=True, use_mmap=False,
        type_k=GGML_TYPE_F32, type_v=GGML_TYPE_F32,
        lora_path=asked["lora"], lora_scale=asked["scale"],
    )  # fmt: skip
except ValueError as error:
    print(error, file=sys.stderr)
    sys.exit(3)
if asked["lora"] and not llama._lora_adapter:
    # 0.3.36 compares this null pointer with None, goes on, and dies of it at the first token.
    sys.exit(3)
prompts = [
    llama.tokenize(each.encode(), add_bos=False, special=True) if isinstance(each, str) else each
    for each in asked["prompts"]
]
found = []
for prompt in prompts:
    llama.reset()
    llama.eval(prompt)
    logits = llama.scores[: len(prompt) - 1].astype(np.float64)
    top = logits.max(1, keepdims=True)
    logprobs = logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))
    found.append(logprobs[range(len(prompt) - 1), prompt[1:]].tolist())
print(json.dumps({"tokens": prompts, "logprobs": found}))
