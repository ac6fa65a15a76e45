"""Findings about servers: before an engine is started, and from ``verify``'s comparison of its output.

``ktbridge serve --allow CODE`` downgrades an error of ``LAUNCH`` to a warning, for users who know better
than an estimate.
"""

from __future__ import annotations

from ktbridge.codes.table import Code, Subject

_ITS_BASE = "check that --base-model is the base this adapter was trained on"

LAUNCH = Subject("Launching an engine", "serve", (
    Code("KTB951", "error", "an adapter can't be opened as its option asks", "check the path"),
    Code("KTB952", "error", "the engine version doesn't support what is asked for",
         "use a version that does"),
    Code("KTB953", "error", "an engine flag contradicts what the launch needs", "leave it out"),
    Code("KTB954", "error", "the engine's parser doesn't know a flag", "see the engine's --help"),
    Code("KTB955", "error", "the server can't listen on this address and port",
         "choose another with --port"),
    Code("KTB956", "error", "the experts' weights don't fit into RAM (a warning where they fit once other"
         " programs end)", "use a machine with more memory"),
    Code("KTB957", "error", "there are too few GPUs, or they are too small",
         "use a GPU machine, or --engine local"),
    Code("KTB958", "error", "kt-kernel can't compute expert LoRA on this CPU (a warning where it was not"
         " tried)", "use a CPU with AMX, or --engine local"),
    Code("KTB959", "info", "this engine version has known vulnerabilities (a warning where other machines"
         " reach it)", "keep its ports off untrusted networks"),
    Code("KTB960", "error", "the model brings its own Python code, which loading it would run",
         "read it, then pass --trust-remote-code"),
    Code("KTB961", "error", "other machines can reach the server and no API key is set, or the key can't"
         " be used", "set KTBRIDGE_API_KEY, or bind to 127.0.0.1"),
    Code("KTB962", "warning", "kt-kernel is of another version than the engine",
         "install matching versions"),
    Code("KTB963", "error", "a name is one that requests can't select", "choose another name"),
    Code("KTB964", "warning", "a ktbridge that had started an engine was killed, and left something of it",
         "nothing if it has been ended; else end the processes by hand"),
    Code("KTB965", "warning", "an environment variable may hide the log line that shows the LoRA was"
         " loaded", "unset it"),
    Code("KTB966", "error", "the engine, or kt-kernel beside it, is not installed",
         "name the interpreter that has it with --engine-python"),
    Code("KTB967", "error", "the engine version computes prompts wrongly with this attention backend: as"
         " if keys had no position",
         "use sglang-kt 0.7.0 or newer, or -- --attention-backend torch_native"),
    Code("KTB968", "error", "the engine computes this model's positions by another base (rope_theta),"
         " silently", "serve it with --engine local, or with vLLM"),
    Code("KTB969", "error", "the engine doesn't tie this model's output head to its embedding, and the"
         " checkpoint stores none: answers come from memory that nobody wrote",
         "store the embedding as lm_head.weight, too, or serve it with --engine local or vLLM"),
))  # fmt: skip

VERIFY = Subject("Verifying", "serve", (
    Code("KTV001", "error", "a tensor of the adapter has no place in the base model, or another shape: no"
         " reference can be computed", _ITS_BASE),
    Code("KTV002", "warning", "the adapter is applied, but the answers are further from the reference than"
         " noise explains", "nothing if the engine holds experts in INT8 or INT4; else compare with another"
         " attention backend, and with another machine"),
    Code("KTV003", "error", "another arm than the verified one isn't what it is named",
         "check what the server serves under this name before comparing arms"),
    Code("KTV010", "error", "the server gives logprobs of no fixed tokens, only of those that it generates"
         " itself: few, and likely ones (a warning where that was asked for)",
         "verify an engine that gives prompt logprobs, or accept this with --logprobs-from sampled"),
    Code("KTV011", "warning", "the server tokenizes prompts otherwise than the base model's tokenizer: they"
         " are left out", "serve the tokenizer and the chat template of --base-model"),
    Code("KTV012", "warning", "the verified name is the base model or half of the adapter, as the server"
         " itself says", "give the name of the whole adapter as --model"),
    Code("KTV020", "error", "a served name answers as another adapter, as the base, or as none of them",
         "see which directory the server loads under this name, and load it again"),
    Code("KTV021", "error", "the base isn't the base: before adapters are asked, among their requests, or"
         " afterwards", "serve the base from a server without adapters, and tell the engine's makers: its"
         " LoRA reaches requests that have none"),
    Code("KTV022", "error", "a name answers otherwise among requests for other names than alone",
         "serve one adapter a server, and tell the engine's makers: rows of a batch get each other's LoRA"),
    Code("KTV023", "error", "a name that was loaded anew answers as the adapter that it had before, or as"
         " none", "restart the server for another adapter, or give each version a name of its own"),
    Code("KTV024", "error", "two adapters, or an adapter and the base, are too much alike to be told apart",
         "verify them one by one with --model, or give adapters that differ"),
    Code("KTV025", "error", "the server has no name of the base, so that nothing shows that it stays as it"
         " is", "serve the base beside the adapters; SGLang-KT has none once an expert LoRA is loaded"),
    Code("KTV026", "error", "an adapter that was exchanged for the check could not be put back",
         "load it by hand, or restart the server"),
    Code("KTV027", "info", "the server gives no logprobs of generated tokens whose ids are known: decoding"
         " was not checked", "nothing, or verify an engine that gives them"),
    Code("KTV030", "error", "the merged checkpoint lacks tensors of its base (a warning for draft layers and"
         " towers, without which the text model works)", "merge or copy again, with all shards"),
    Code("KTV031", "error", "a tensor of the merged checkpoint, or of its base, can't be compared: another"
         " shape, or a storage that isn't read", "check that both directories belong to one model"),
    Code("KTV032", "error", "tensors without LoRA are not the base's",
         "give the very base model that was merged into, or find out what else was trained"),
    Code("KTV033", "warning", "the merged checkpoint has tensors that its base hasn't",
         "nothing if a tool adds them; else check that both directories belong to one model"),
))  # fmt: skip

SUBJECTS = (LAUNCH, VERIFY)
