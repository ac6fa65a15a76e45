"""Logprobs of tokens that a server generates: all that llama.cpp's servers, TGI and most gateways give.

Each prompt is continued greedily, and the logprobs of the continuation are what is measured; references are
then computed on that very continuation. The server chooses the tokens, so that they are few, likely ones,
others for every arm, and none is known where a token's id isn't: this says less than fixed tokens do.

Prompts are sent to /v1/completions as ids, as text where ids are refused, and through the chat template of
/v1/chat/completions where completions have no logprobs. A prompt that the server counts another number of
tokens for is left out: it isn't the sequence that the reference would be computed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ktbridge.server_api.client import Refused
from ktbridge.verify.logprobs import ENOUGH, LogprobClient
from ktbridge.verify.protocols import SpanLogprobs, TokenSpan, Unusable, dig, finite_floats, shorten_refusal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LENGTH = 16  # tokens generated for each prompt
FORMS = {
    "ids": "/v1/completions, prompts as ids",
    "text": "/v1/completions, prompts as text",
    "chat": "/v1/chat/completions",
}
_REFUSED = (400, 404, 405, 415, 422, 500, 501)  # what a form that a server doesn't have ends in


class ContinuationSampler:
    """Continues prompts on a server. ``form`` is how they are given, one of FORMS.

    ``prompts`` are token ids. ``unlike`` counts prompts that the server tokenizes otherwise.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]]) -> None:
        self.form, self.unlike = "", 0
        self._tokenizer, self.prompts = tokenizer, prompts

    @property
    def size(self) -> int:
        """Number of ids in the vocabulary."""
        return len(self._tokenizer)

    def text(self, prompt: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(prompt)))

    def choose(self, client: LogprobClient, model: str) -> None:
        """Take the first form whose answers have logprobs. Raises Unusable with the reasons if none does."""
        self._client = client
        said = []
        for form in FORMS:
            self.form = form
            try:
                found = [self(model, n) for n in range(len(self.prompts))]
                usable = sum(asked[0].size for asked in found if asked)
                if usable >= ENOUGH:
                    self.unlike = found.count(None)
                    return
                why = f"{usable} tokens whose ids are known"
                if None in found:
                    why += f", {found.count(None)} of {len(found)} prompts tokenized otherwise than here"
                said.append(f"{form}: {why}")
            except Refused as refused:
                if refused.status not in _REFUSED:
                    raise
                said.append(f"{form}: {shorten_refusal(refused)}")
            except Unusable as unusable:
                said.append(f"{form}: {unusable.what}")
        raise Unusable(f"no {ENOUGH} sampled tokens ({'; '.join(said)})")

    def __call__(self, model: str, number: int) -> SpanLogprobs | None:
        """The continuation of one prompt; None where the server tokenizes the prompt otherwise."""
        ids, given = self._given(self.prompts[number])
        body = {"model": model, "max_tokens": LENGTH, "temperature": 0, **given}
        path = "/chat/completions" if self.form == "chat" else "/completions"
        answer = self._client.ask(path, body)
        counted = dig(answer, "usage", "prompt_tokens")
        if counted == len(ids) + 1 and self.form == "text":
            bos = self._tokenizer.bos_token_id
            ids = ids if bos is None else [bos, *ids]
        if counted != len(ids):
            return None
        generated = dig(answer, "usage", "completion_tokens")
        tokens, logprobs = self._generated(dig(answer, "choices", 0, "logprobs"), generated)
        return TokenSpan((*ids, *tokens), len(ids)), logprobs

    def _given(self, prompt: Sequence[int]) -> tuple[list[int], dict[str, object]]:
        """The prompt's ids, and the part of the request that gives it."""
        if self.form == "ids":
            return list(prompt), {"prompt": list(prompt), "logprobs": 1}
        text = self.text(prompt)
        if self.form == "text":
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            return ids, {"prompt": text, "logprobs": 1}
        if not self._tokenizer.chat_template:
            raise Unusable("no chat template in --base-model")
        messages: list[Any] = [{"role": "user", "content": text}]
        found = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return list(found), {"messages": messages, "logprobs": True, "top_logprobs": 1}

    def _generated(self, logprobs: Any, count: Any) -> tuple[list[int], list[float]]:
        """Ids and logprobs of the generated tokens, up to the first that isn't known for sure.

        OpenAI's completions have parallel lists, its chat a list of objects; llama-server adds ids to these,
        and vLLM can be told to write ids as text (``--return-tokens-as-token-ids``). llama-server leaves out
        tokens that end inside a character and gives the next one's id with the text of them all.
        """
        if isinstance(content := dig(logprobs, "content"), list):
            rows = [(dig(row, "id"), dig(row, "token"), dig(row, "logprob")) for row in content]
        elif isinstance(values := dig(logprobs, "token_logprobs"), list):
            texts = dig(logprobs, "tokens") or []
            rows = [(None, t, v) for t, v in zip(texts, values, strict=False)]
        else:
            raise Unusable("no logprobs of generated tokens")
        # A last token that only ends the text may be counted and not listed.
        if isinstance(count, int) and rows and rows[0][0] is None and count - len(rows) not in (0, 1):
            return [], []
        tokens: list[int] = []
        for given, text, _ in rows:
            token = self._id_of(str(text)) if given is None else given
            if token is None or (given is not None and self._texts.get(given) != text):
                break
            tokens.append(token)
        return tokens, finite_floats([value for _, _, value in rows[: len(tokens)]])

    def _id_of(self, text: str) -> int | None:
        if text.startswith("token_id:") and text[9:].isdigit():
            return int(text[9:])
        return self._ids.get(text)

    @cached_property
    def _texts(self) -> dict[int, str]:
        """Id -> text of all tokens but those that are a part of a character."""
        names = self._tokenizer.convert_ids_to_tokens(list(range(len(self._tokenizer))))
        texts = self._tokenizer.batch_decode([[n] for n in range(len(names))])
        found = {}
        for number, (name, text) in enumerate(zip(names, texts, strict=True)):
            # SentencePiece's decoders drop the space that a first word begins with; servers don't.
            spaced = str(name).startswith("▁") and not text.startswith(" ")
            if "\N{REPLACEMENT CHARACTER}" not in text:
                found[number] = f" {text}" if spaced else text
        return found

    @cached_property
    def _ids(self) -> dict[str, int | None]:
        """Text -> id; None for texts that several tokens have."""
        found: dict[str, int | None] = {}
        for number, text in self._texts.items():
            found[text] = None if text in found else number
        return found
