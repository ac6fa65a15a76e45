"""Continuous batching: what an answer says does not depend on who else is answered."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import pairwise

import moefamilies
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer

from ktbridge.experts.inject import wrap_experts
from ktbridge.experts.layer import expert_layers
from ktbridge.experts.lora_targets import find_lora_targets, inject_lora
from ktbridge.serve.local.batch import Ask, Batch, Job, QueueFull, ServerStopping, Worker
from ktbridge.serve.local.engine import LocalEngine, Mixer
from ktbridge.serve.local.sampling import HEAD, Finish, Sampling, TokenSampler
from ktbridge.server_api.served_names import ServedArm

BASE, EXPERT = ServedArm("s:base", False, None), ServedArm("s", True, None)
BOTH, OTHER = ServedArm("s:a", True, "a"), ServedArm("s:b", False, "b")
ARMS = (BASE, EXPERT, BOTH, OTHER)
KINDS = {
    "qwen3_moe": {},
    "qwen3_5_moe_text": {},  # linear attention: states without positions
    "deepseek_v3": {},  # latent attention, shared experts
    "mixtral": {"sliding_window": 8},  # a cache that forgets
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """These matrices are too small to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class NoWords:
    """A tokenizer of a model whose tokens are read as numbers only."""

    all_special_ids = ()
    backend_tokenizer = eos_token_id = None

    def decode(self, ids, **_: object) -> str:
        return "".join(f"<{token}>" for token in ids)


def make_engine(kind: str) -> LocalEngine:
    """A random model with LoRA everywhere: experts, and two adapters on all linears and routers."""
    torch.manual_seed(0)
    model = moefamilies.made(kind, moefamilies.FAMILIES[kind] | KINDS[kind]).eval()
    model.to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".gate.weight", ".router.weight")):
                parameter.mul_(10)  # choices that rounding does not turn over
            if "embed" in name or "lm_head" in name or ".experts." in name:
                parameter.mul_(10)
    found = find_lora_targets(model)
    for slot in ("slot0", "slot1"):
        lora = LoraConfig(r=4, lora_alpha=8, inference_mode=True)
        inject_lora(model, sorted(found.modules), found, lora, slot)
    wrap_experts(model, 4, 8, threads=1)
    tuned = [module for module in model.modules() if isinstance(module, LoraLayer)]
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.3)
    for layer in tuned:
        layer.to(torch.bfloat16)
    assert expert_layers(model)
    model.requires_grad_(False)
    engine = LocalEngine(model, NoWords(), {"a": "slot0", "b": "slot1"}, tuned)
    engine.stop_ids = frozenset()  # answers as long as asked for
    return engine


@dataclass
class Asker:
    """Collects what it is told."""

    cancelled: bool = False
    said: dict[int, list] = field(default_factory=dict)
    error: BaseException | None = None

    def deliver(self, choice, event) -> None:
        self.said.setdefault(choice, []).append(event)

    def fail(self, error) -> None:
        self.error = error

    def entries(self, choice: int = 0) -> list:
        assert isinstance(self.said[choice][-1], Finish)
        return [entry for event in self.said[choice][:-1] for entry in event.logprobs]


def ask(arm: ServedArm, prompt: list[int], tokens: int, **options) -> Ask:
    sampling = Sampling(max_tokens=tokens, temperature=0, top_logprobs=0)
    return Ask(arm, prompt, sampling, Asker(), **options)


def admit(batch: Batch, one: Ask) -> None:
    """Begin ``one`` and run its prompt to the end, as the worker does between steps."""
    batch.begin(one)
    while batch.pending is not None:
        batch.advance()


@pytest.mark.quick("qwen3_moe|deepseek_v3")
@pytest.mark.parametrize("kind", KINDS)
def test_a_crowd_changes_nothing(kind):
    """Prompts of several lengths and arms come and go; each answer is what its arm says to its prompt.

    The judge is one plain pass over prompt and answer: no cache, no other rows, no mixed arms.
    """
    engine = make_engine(kind)
    engine.warm_up(ARMS)
    assert engine.batchable
    assert engine.chunkable
    batch = Batch(engine, running=8, cells=10**6, chunk=5)
    lengths = ((5, 14), (23, 4), (1, 12), (12, 9), (2, 16), (17, 3))
    asks = [
        ask(ARMS[i % 4], [(7 * i + j) % 60 + 3 for j in range(length)], tokens, n=1 + (i == 3))
        for i, (length, tokens) in enumerate(lengths)
    ]
    arrivals = {0: asks[:2], 1: asks[2:3], 3: asks[3:5], 9: asks[5:]}
    most = 0
    for step in range(24):
        for one in arrivals.get(step, ()):
            admit(batch, one)
        batch.step()
        most = max(most, len(batch.rows))
    assert most == 6
    assert batch.rows == []
    for one in asks:
        for choice in range(one.n):
            entries = one.listener.entries(choice)
            assert len(entries) == one.sampling.max_tokens
            text = [*one.prompt, *(entry.token for entry in entries)]
            logits, _ = engine.prefill(one.arm, text, True)
            judged = logits[len(one.prompt) - 1 : -1].float()
            spread = judged.std(-1)
            for entry, row, scale in zip(entries, judged, spread, strict=True):
                assert row.max() - row[entry.token] < 0.1 * scale  # greedy, but for near ties
                assert entry.logprob == pytest.approx(
                    row.log_softmax(-1)[entry.token].item(), abs=0.1 * scale.item()
                )
    # And the arms do differ by far more than that.
    first = [engine.prefill(arm, asks[1].prompt, False)[0][-1].float() for arm in ARMS]
    for i, one_arm in enumerate(first):
        for other in first[:i]:
            assert (one_arm - other).std() > 0.3 * one_arm.std()


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    made = make_engine("qwen3_moe")
    made.warm_up(ARMS)
    return made


def test_what_fails_fails_alone(engine):
    """A prompt that can't be computed leaves the others where they were."""
    batch = Batch(engine, running=4, cells=10**6)
    good, bad, late = ask(BOTH, [5, 6], 6), ask(BASE, [10**6], 3), ask(EXPERT, [9], 3)
    admit(batch, good)
    batch.step()
    admit(batch, bad)
    admit(batch, late)
    while batch.rows:
        batch.step()
    assert isinstance(bad.listener.error, IndexError)
    alone = ask(BOTH, [5, 6], 6)
    admit(batch, alone)
    while batch.rows:
        batch.step()
    tokens = [[e.token for e in one.listener.entries()] for one in (good, alone)]
    assert tokens[0] == tokens[1]
    assert len(late.listener.entries()) == 3


def test_a_long_prompt_holds_nobody_up(engine):
    """Its chunks and the others' tokens take turns; a scored one gets the same logprobs in parts."""
    batch = Batch(engine, running=4, cells=10**6, chunk=256)
    running = ask(BOTH, [5, 6], 10**5)
    admit(batch, running)
    prompt = [i % 50 + 3 for i in range(2000)]
    scoring = Sampling(max_tokens=1, temperature=0, prompt_logprobs=True)
    batch.begin(Ask(EXPERT, prompt, scoring, listener := Asker()))
    seen = [len(running.listener.said[0])]
    while batch.pending is not None:
        batch.advance()
        batch.step()
        seen.append(len(running.listener.said[0]))
    assert len(seen) == 1 + 8  # 2000 tokens in chunks of 256
    assert [b - a for a, b in pairwise(seen)] == [1] * 8
    batch.drop_all(RuntimeError())
    parts = [entry.logprob for entry in listener.said[0][0].logprobs]
    admit(batch, Ask(EXPERT, prompt, scoring, listener := Asker()))  # alone: in one piece
    whole = [entry.logprob for entry in listener.said[0][0].logprobs]
    assert parts[0] is whole[0] is None
    assert parts[1:] == pytest.approx(whole[1:], abs=0.2)
    # Whoever hangs up on a prompt half-way leaves nothing behind.
    admit(batch, ask(BOTH, [5, 6], 10**5))
    gone = ask(BASE, prompt, 3)
    batch.begin(gone)
    batch.advance()
    gone.listener.cancelled = True
    batch.advance()
    assert (batch.pending, len(batch.rows), gone.listener.said) == (None, 1, {})


def test_a_seed_draws_the_same_wherever_it_is_answered(engine):
    """Alone, beside other arms, and after a prompt in chunks: each token is the one that its seed's next
    number falls upon, in the distribution of one plain pass over prompt and answer."""
    prompt = [i % 50 + 3 for i in range(40)]

    def seeded() -> Ask:
        sampling = Sampling(max_tokens=24, temperature=0.8, seed=11, top_logprobs=0)
        return Ask(BOTH, prompt, sampling, Asker())

    crowded = Batch(engine, running=4, cells=10**6, chunk=7)
    for arm in (BASE, OTHER, EXPERT):
        admit(crowded, ask(arm, [5, 6, 7], 60))
    alone = Batch(engine, running=4, cells=10**6)
    answers = []
    for batch in (alone, crowded, alone):
        answers.append(one := seeded())
        batch.begin(one)
        while not isinstance(one.listener.said.get(0, [None])[-1], Finish):
            batch.advance()
            batch.step()
    said = [[entry.token for entry in one.listener.entries()] for one in answers]
    assert said[0] == said[2]
    for tokens in said[:2]:
        logits, _ = engine.prefill(BOTH, [*prompt, *tokens], True)
        shares = (logits[len(prompt) - 1 : -1].float() / 0.8).softmax(-1).cumsum(-1)
        numbers = torch.rand(24, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
        for token, its, number in zip(tokens, shares, numbers, strict=True):
            below = its[token - 1] if token else 0
            assert below - 0.03 <= number <= its[token] + 0.03
    # A number of its own for every token, and other ones for another seed.
    assert len(set(said[0])) > 5


@pytest.mark.slow
def test_a_draw_is_as_likely_as_its_word():
    """Frequencies of a seeded picker, within five standard deviations; a nucleus holds the rest out."""
    shares = torch.tensor([0.05, 0.5, 0.15, 0.0, 0.3])
    for top_p, top_k, expected in (
        (1.0, 0, shares),
        (0.7, 0, torch.tensor([0, 0.625, 0, 0, 0.375])),
        (1.0, 3, torch.tensor([0, 0.5, 0.15, 0, 0.3]) / 0.95),
        (0.6, 3, torch.tensor([0, 0.625, 0, 0, 0.375])),  # of the three alone
        (1.0, 99, shares),
    ):
        picker = TokenSampler(Sampling(1, top_p=top_p, top_k=top_k, seed=5))
        drawn = torch.tensor([picker.pick(shares.log()) for _ in range(1000)])
        found = drawn.bincount(minlength=5) / len(drawn)
        assert bool(((found - expected).abs() <= 5 * (expected / len(drawn)).sqrt()).all())
    # A nucleus wider than where it is looked for first is found all the same.
    flat = torch.zeros(3 * HEAD)
    picker = TokenSampler(Sampling(1, top_p=0.5, seed=5))
    assert len({picker.pick(flat) for _ in range(1200)}) > HEAD
    with pytest.raises(ArithmeticError):
        picker.pick(torch.full((8,), torch.nan))


def test_room_is_kept_for_what_was_begun(engine):
    """Rows times the longest that one may come to stays within the cache's cells."""
    batch = Batch(engine, running=3, cells=60)
    admit(batch, ask(BASE, [1] * 5, 15))
    assert batch.fits(ask(BASE, [1] * 5, 25))
    assert not batch.fits(ask(BASE, [1] * 5, 26))
    assert batch.fits(ask(BASE, [1] * 5, 10, n=2))
    assert not batch.fits(ask(BASE, [1] * 5, 10, n=3))
    batch.drop_all(RuntimeError())
    assert batch.fits(ask(BASE, [1] * 5, 10**4))


async def read(job: Job) -> list:
    return [event async for event in job]


def test_queue_limit_cancellation_and_end(engine):
    async def scenario() -> None:
        worker = Worker(Batch(engine, running=2, cells=10**6), max_waiting=2)

        def submit(tokens: int, prompts: int = 1) -> Job:
            job = Job(prompts, worker.outbox)
            sampling = Sampling(max_tokens=tokens, temperature=0)
            worker.submit([Ask(BOTH, [3, 4], sampling, job, first=i) for i in range(prompts)])
            return job

        async def until(condition) -> None:
            for _ in range(4000):
                if condition():
                    return
                await asyncio.sleep(0.005)
            raise AssertionError("it never came to that")

        long = [submit(100_000), submit(100_000)]
        await until(lambda: worker.running == 2)
        short = submit(3)
        with pytest.raises(QueueFull):
            submit(3, prompts=2)
        gone = submit(3)
        with pytest.raises(QueueFull):
            submit(3)
        gone.cancel()
        replaced = submit(2)  # one that nobody waits for takes no place
        assert worker.waiting == 2
        long[0].cancel()
        events = await asyncio.wait_for(read(short), 20)
        assert events[-1] == (0, Finish("length", 3))
        assert (await asyncio.wait_for(read(replaced), 20))[-1] == (0, Finish("length", 2))

        # What is accepted before the end is announced is still answered.
        accepted = submit(4, prompts=2)
        worker.drain()
        with pytest.raises(ServerStopping):
            submit(1)
        events = await asyncio.wait_for(read(accepted), 20)
        assert {choice for choice, _ in events} == {0, 1}
        await until(lambda: worker.running == 1)
        worker.close()
        with pytest.raises(ServerStopping):
            await asyncio.wait_for(read(long[1]), 20)
        worker.join(5)
        assert worker.running == worker.waiting == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_on_linear_layers_is_what_peft_adds(dtype):
    """Each adapter alone and rows of several: as PEFT's own forward, within rounding."""
    torch.manual_seed(0)
    holder = torch.nn.ModuleDict({"proj": torch.nn.Linear(48, 32)}).to(dtype)
    for slot in ("slot0", "slot1"):
        lora = LoraConfig(r=4, lora_alpha=6, target_modules=["proj"], init_lora_weights=False)
        inject_adapter_in_model(lora, holder, slot)
        del holder.peft_config  # PEFT warns of a second one
    layer = holder["proj"].to(dtype)
    mixer = Mixer.__new__(Mixer)
    ours, x = mixer._forward_of(layer), torch.randn(6, 3, 48).to(dtype)
    near = {"rtol": 2**-7, "atol": 2**-5} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    said = {None: layer.base_layer(x)}
    with torch.inference_mode():
        for slot in ("slot0", "slot1"):
            layer.set_adapter(slot)
            said[slot] = type(layer).forward(layer, x)
            mixer.groups = ((slot, None),)
            assert torch.allclose(ours(x), said[slot], **near)
        rows = {None: [0, 4], "slot1": [1, 5], "slot0": [2, 3]}
        mixer.groups = tuple((slot, torch.tensor(some)) for slot, some in rows.items())
        mixed = ours(x)
        for slot, some in rows.items():
            assert torch.allclose(mixed[some], said[slot][some], **near)
        assert not torch.allclose(said["slot0"], said["slot1"], **near)
