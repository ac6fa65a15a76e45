"""Dialogues, repeats, several benches, discovered arms, other sampling: what is sent, kept and refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shlex

import evalruns
import pytest
from evalruns import BENCH, SMALL, arm_words, is_item

from ktbridge.cli.eval import command
from ktbridge.errors import KtbridgeError, ProblemsError, UsageError
from ktbridge.eval import load_bench, parse_arms, score_run
from ktbridge.eval.arms import discover_arms, parse_model
from ktbridge.eval.bench import parse_bench, parse_extra_body, with_sampling
from ktbridge.eval.store import (
    ANSWERS,
    JUDGEMENTS,
    Ledger,
    read_benches,
    read_ledger,
    read_run,
    request_key,
)

TALK = load_bench("beyond-dialogue")
GUEST = "嗯，那后来呢？"


def run(server, out, **options):
    """Of two of the server's arms, unless told otherwise."""
    return evalruns.run(server, out, **{"arms": server.arms[::2], **options})


def invoke(*words):
    return evalruns.invoke(command, *words)


# --- dialogues


@pytest.fixture
def guest(server):
    """A partner on the same server; ``server.fails`` is a scene in which it breaks down."""
    server.listed = [*server.listed, {"id": "guest"}]
    server.fails = None

    def behave(request, nth):
        if request["model"] != "guest":
            return None
        if server.fails and server.fails in request["messages"][0]["content"]:
            return 400, {}, {"error": {"message": "no"}}
        return 200, {}, server.completion(GUEST)

    server.behave = behave
    return parse_model("partner", f"guest@{server.url}")


def test_a_dialogue_is_held_turn_by_turn_and_stored_whole(server, guest, tmp_path):
    done = run(server, tmp_path, bench=TALK, partner=guest)
    assert done.outcomes == {"ok": 14}
    records = {
        (one["arm"], one["item"]): one
        for one in read_ledger(tmp_path, ANSWERS).values()
        if one["item"].startswith("dialogue")
    }
    assert len(records) == 8
    item = TALK.items[1]
    record = records["full", item.id]
    turns = record["turns"]
    assert [one["role"] for one in turns] == ["assistant", "user"] * 3 + ["assistant"]
    assert record["text"] == "\n\n".join(one["content"] for one in turns[::2])
    assert [one["content"] for one in turns[1::2]] == [GUEST] * 3
    assert (record["prompt_tokens"], record["completion_tokens"]) == (36, 20)
    sent = [one for one in server.requests if one["model"] == "tiny:neko" and is_item(one)]
    last = [*map(dict, item.messages), *turns[:-1]]
    assert sum(one["messages"] == last for one in sent) == 1, "the arm sees all that was said"
    # The partner sees the scene first, then the talk with the roles changed, one after the other.
    partners = [one["messages"] for one in server.requests if one["model"] == "guest"]
    assert len(partners) == 8 * 3
    for messages in partners:
        assert [one["role"] for one in messages[:2]] == ["user", "assistant"]
        roles = [one["role"] for one in messages]
        assert all(a != b for a, b in itertools.pairwise(roles)), roles
        assert messages[0]["content"].startswith(TALK.partner.system.strip())
    assert any(item.messages[0]["content"] in messages[0]["content"] for messages in partners)
    assert run(server, tmp_path, bench=TALK, partner=guest).asked == 0
    rows = {row["id"]: row for row in score_run(tmp_path)["items"]}
    assert rows[item.id]["answers"]["full"]["turns"] == turns
    assert read_run(tmp_path)["arms"]["full"]["partner"] == {"model": "guest", "url": guest.url}


def test_a_dialogue_that_breaks_down_is_asked_again_and_others_are_not(server, guest, tmp_path):
    server.fails = TALK.items[2].messages[0]["content"]
    done = run(server, tmp_path, bench=TALK, partner=guest)
    assert done.outcomes == {"ok": 12, "http-error": 2}
    failed = [one for one in read_ledger(tmp_path, ANSWERS).values() if one["outcome"] != "ok"]
    for record in failed:
        assert record["detail"].startswith("turn 1: the partner's is http-error: HTTP 400")
        assert (record["item"], len(record["turns"])) == (TALK.items[2].id, 1)
    server.fails = None
    assert run(server, tmp_path, bench=TALK, partner=guest).asked == 2
    # Another partner, or the same with other words, is another conversation; what needs none stays.
    server.listed = [*server.listed, {"id": "guest2"}]
    other = dataclasses.replace(guest, model="guest2")
    server.behave = lambda request, nth: (
        (200, {}, server.completion("哦？")) if request["model"] == "guest2" else None
    )
    told = []
    again = run(
        server,
        tmp_path,
        bench=TALK,
        partner=other,
        arms=server.arms[:1],
        on_preflight=lambda found: told.extend(one.code for one in found.problems),
    )
    assert (again.asked, again.stored) == (4, 3)
    assert "KTB809" in told, "the other arm talked with another partner"
    files = dict(TALK.files)
    files["bench.yaml"] = files["bench.yaml"].replace(b"one short turn", b"one long turn")
    server.behave = lambda request, nth: None if request["model"] != "guest" else behave_guest
    behave_guest = (200, {}, server.completion(GUEST))
    assert run(server, tmp_path, bench=parse_bench(files), partner=guest).stored == 6


def test_a_dialogue_without_a_fitting_partner_is_refused_before_any_request(server, tmp_path):
    with pytest.raises(UsageError, match="no partner") as caught:
        run(server, tmp_path, bench=TALK)
    assert "--slices OBJECTIVE" in caught.value.next_step
    private = TALK.model_copy(update={"private": True})
    with pytest.raises(UsageError, match=r"partner 'far\.example' is another machine"):
        run(server, tmp_path, bench=private, partner=parse_model("partner", "m@http://far.example"))
    assert server.requests == []
    assert run(server, tmp_path, bench=TALK, slices=("OBJECTIVE",), limit=None).asked == 6
    with pytest.raises(ProblemsError) as problems:
        run(server, tmp_path, bench=TALK, partner=parse_model("partner", f"guest@{server.url}"))
    assert [one.where for one in problems.value.problems] == ["the partner"]


# --- repeats and sampling


def test_repeats_send_the_same_when_greedy_and_other_seeds_when_not(server, tmp_path):
    first = run(server, tmp_path, limit=8)
    assert first.asked == 16
    assert run(server, tmp_path, limit=8, repeat=3).stored == 16, "repeat 0 is what was there"
    assert read_run(tmp_path)["repeat"] == 3
    asked = [json.dumps(one) for one in server.requests if is_item(one)]
    assert len(asked) == 48
    assert {asked.count(one) for one in asked} == {3}
    assert run(server, tmp_path, limit=8, repeat=2).asked == 0
    assert read_run(tmp_path)["repeat"] == 3, "the largest ever asked"
    request = server.requests[-1]
    assert request_key("f", request, 0) == request_key("f", request)
    assert request_key("f", request, 1) != request_key("f", request)
    server.requests.clear()
    warm = with_sampling(BENCH, {"temperature": 0.7})
    assert run(server, tmp_path, bench=warm, limit=8, repeat=2).stored == 0
    seeds = [one["seed"] for one in server.requests if is_item(one)]
    assert sorted(seeds) == [0] * 16 + [1] * 16


def test_extra_fields_are_sent_recorded_and_part_of_the_key(server, tmp_path):
    run(server, tmp_path)
    off = parse_extra_body('{"chat_template_kwargs": {"enable_thinking": false}, "top_p": null}')
    assert run(server, tmp_path, bench=with_sampling(BENCH, off)).stored == 0
    sent = server.requests[-1]
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}
    assert "top_p" not in sent
    results = score_run(tmp_path)
    assert results["bench"]["sampling"]["chat_template_kwargs"] == {"enable_thinking": False}
    assert results["valid"] == 16
    with pytest.raises(UsageError, match="--extra-body sets messages"):
        with_sampling(BENCH, {"messages": []})
    for text in ("{", "[]", "null"):
        with pytest.raises(UsageError, match="--extra-body"):
            parse_extra_body(text)


def test_another_adapter_template_sampling_or_question_never_gets_an_old_answer(server, tmp_path):
    run(server, tmp_path)
    server.listed = [{**entry, "created": 99} for entry in server.listed]
    assert run(server, tmp_path).asked == 0, "a time stamp is not another model"
    changes = [{"root": "/other/weights"}, {"fingerprint": "a"}, {"fingerprint": "b"}]
    for change in (*changes, {"fingerprint": "a", "chat_template": "c"}):
        server.listed = [{**entry, **change} for entry in server.listed]
        assert run(server, tmp_path).stored == 0, change
    files = dict(BENCH.files)
    files["bench.yaml"] = files["bench.yaml"].replace(b"seed: 0", b"seed: 1")
    assert run(server, tmp_path, bench=parse_bench(files)).stored == 0
    files = dict(BENCH.files)
    asked = BENCH.select(limit=16)[5].messages[0]["content"]
    files["items.jsonl"] = files["items.jsonl"].replace(asked.encode(), f"{asked} 好吗".encode())
    assert run(server, tmp_path, bench=parse_bench(files)).asked == 2
    # A template that the server doesn't list shows in the prompts' lengths: nothing is mixed.

    def longer(request, nth):
        if "no-such" in request["model"]:
            return None
        body = server.completion(server.plain(request["model"], request["messages"][-1]["content"]))
        body["usage"]["prompt_tokens"] += 7
        return 200, {}, body

    server.behave = longer
    with pytest.raises(ProblemsError) as caught:
        run(server, tmp_path)
    assert {one.code for one in caught.value.problems} == {"KTB808"}


# --- arms of a server


EMBEDDED = {
    "tiny": "base + expert LoRA",
    "tiny:neko": "base + expert LoRA + non-expert LoRA neko",
    "tiny:base": "base",
}


def test_the_arms_of_a_server_are_found(server):
    server.listed = [{"id": name, "description": said} for name, said in EMBEDDED.items()]
    found = discover_arms(server.url)
    assert found == parse_arms(server.arms)
    server.listed[1]["description"] = EMBEDDED["tiny"]  # an adapter of experts only
    assert [one.name for one in discover_arms(server.url)] == ["base", "expert"]
    server.listed = [{"id": name} for name in EMBEDDED]
    assert discover_arms(server.url) == found


@pytest.mark.parametrize(
    ("names", "lines"),
    [
        (["tiny", "neko"], ["expert=tiny", "full=tiny:neko"]),
        ([*EMBEDDED, "tiny:dog"], ["base=tiny:base", "full=tiny:neko", "full=tiny:dog"]),
        (["a:base", "b:base"], ["base=a:base", "base=b:base"]),
        ([], []),
    ],
)
def test_a_list_that_does_not_tell_is_no_guess(server, names, lines):
    server.listed = [{"id": name} for name in names]
    with pytest.raises(UsageError) as caught:
        discover_arms(server.url)
    for line in lines:
        assert f"--arm {line}@{server.url}" in caught.value.next_step
    with pytest.raises(UsageError, match="no server's URL"):
        discover_arms("tiny")


LISTS = {
    "ours": [
        {"id": name, "owned_by": "ktbridge", "description": said, "fingerprint": said}
        for name, said in EMBEDDED.items()
    ],
    "vllm": [
        {"id": "m", "owned_by": "vllm", "root": "org/m", "parent": None},
        {"id": "m-too", "owned_by": "vllm", "root": "org/m", "parent": None},
        {"id": "neko", "owned_by": "vllm", "root": "dir/neko", "parent": "m"},
    ],
    "sglang": [
        {"id": "tiny", "owned_by": "sglang", "root": "tiny", "parent": None},
        {"id": "neko", "owned_by": "sglang", "root": "dir/neko", "parent": "tiny"},
    ],
}
NOT_THE_BASE = ("KTB816", "error")


@pytest.mark.parametrize(
    ("listed", "arms", "found", "next_step"),
    [
        ("ours", "base=tiny full=tiny:neko", [("base", *NOT_THE_BASE)], "--arm base=tiny:base@"),
        ("ours", "baseline=tiny:neko full=tiny:neko", [
            ("baseline", *NOT_THE_BASE), ("full and baseline", "KTB817", "error")], "tiny:base"),
        ("ours", "base=tiny:base full=tiny", [("full", *NOT_THE_BASE)], "--arm full=tiny:neko@"),
        ("ours", "base=tiny:base full=tiny:base", [
            ("full", *NOT_THE_BASE), ("base and full", "KTB817", "error")], "with the adapter"),
        ("ours", "expert=tiny:neko full=tiny:neko", [
            ("expert", *NOT_THE_BASE), ("expert and full", "KTB817", "error")], "--arm full=tiny:neko@"),
        ("ours", "old=tiny new=tiny:neko", [("old", "KTB816", "warning")], "tiny:base is the base"),
        ("ours", "base=tiny:base expert=tiny full=tiny:neko", [], ""),
        ("ours", "base=bas full=tiny:neko", [("base", "KTB802", "error")], "--arm base=tiny:base@"),
        ("vllm", "base=neko full=m", [
            ("base", *NOT_THE_BASE), ("full", "KTB816", "warning")], "--arm base=m@"),
        ("vllm", "base=m other=m-too full=neko", [("base and other", "KTB817", "warning")], "another model"),
        ("vllm", "base=m full=m:neko", [("full", "KTB802", "error")], "name a listed model"),
        ("sglang", "base=tiny full=neko", [("full", "KTB816", "error")], "--arm full=tiny:neko@"),
        ("sglang", "base=tiny full=tiny:neko", [], ""),
        ("sglang-kt", "base=tiny full=tiny:neko", [("base", *NOT_THE_BASE)], "by a server of its own"),
        ("sglang-kt", "expert=tiny full=tiny:neko", [], ""),
    ],
)  # fmt: skip
def test_an_arm_that_is_not_what_its_name_says_is_refused(server, tmp_path, listed, arms, found, next_step):
    """Also two arms that are one model: what the server says is read, and no question is asked."""
    server.listed = LISTS.get(listed, LISTS["sglang"])
    known = {entry["id"] for entry in server.listed} | {"tiny:neko"}
    server.behave = lambda request, nth: (
        (200, {}, server.completion(f"{request['model']}: {request['messages'][-1]['content']}"))
        if request["model"] in known
        else (404, {}, {"error": "no such model"})
    )
    if listed == "sglang-kt":
        listing = server.get
        server.get = lambda path: (
            {"kt_expert_lora_path": "dir/experts"} if path == "/server_info" else listing(path)
        )
    words = [f"{word}@{server.url}" for word in arms.split()]
    problems = []
    try:
        problems += run(server, tmp_path, arms=words, limit=2).problems
    except ProblemsError as error:
        problems += error.problems
        assert not any("messages" in one and one["max_tokens"] > 1 for one in server.requests)
    told = [(one.where.partition(" ")[2], one.code, one.severity) for one in problems]
    assert [one for one in told if one[1] != "KTB806"] == found
    assert not found or next_step in problems[0].next_step


def test_a_parent_changes_no_fingerprint_of_an_engine_that_has_its_own(server, tmp_path):
    """0.6.0 listed none: what it stored is not asked again."""
    server.listed = LISTS["ours"]
    run(server, tmp_path, limit=8)
    server.listed = [{**entry, "parent": "tiny:base"} for entry in LISTS["ours"]]
    assert run(server, tmp_path, limit=8).asked == 0


def test_arms_of_vllm_and_sglang_are_found_by_their_parent(server):
    for name, full in (("vllm", "neko"), ("sglang", "tiny:neko")):
        server.listed = LISTS[name]
        base = LISTS[name][0]["id"]
        found = [(one.name, one.model) for one in discover_arms(server.url)]
        assert found == [("base", base), ("full", full)]


# --- the command


def test_a_dry_run_counts_and_asks_nothing(server, tmp_path):
    words = ["--bench", SMALL, "--server", server.url, "--out", tmp_path, "--limit", 16]
    words += ["--repeat", 2, "--dry-run", "--json"]
    before = invoke(*words)
    assert before.exit_code == 0, before.output
    assert server.requests == []
    assert list(tmp_path.iterdir()) == []
    (plan,) = json.loads(before.stdout)["benches"]
    arms = {one["name"]: one for one in plan["arms"]}
    assert list(arms) == ["base", "expert", "full"]
    assert (arms["full"]["wanted"], arms["full"]["stored"]) == (32, 0)
    assert sum(arms["full"]["slices"].values()) == 32
    longest = 2 * sum(item.max_tokens for item in BENCH.select(limit=16))
    assert arms["full"]["completion_tokens_at_most"] == longest
    assert 0 < arms["full"]["prompt_tokens"] < longest
    run(server, tmp_path, limit=16)
    asked = len(server.requests)
    (plan,) = json.loads(invoke(*words).stdout)["benches"]
    assert [one["stored"] for one in plan["arms"]] == [16, 0, 16]
    assert len(server.requests) == asked
    shown = invoke(*words[:-1])
    assert shown.exit_code == 0, shown.output
    assert "to ask" in shown.stdout


SENSELESS = [  # what stands in place of --bench SMALL, words besides the arms, what is said
    ("", "", "give --bench NAME"),
    (f"--bench {SMALL} --bench {SMALL}", "", "two benches are named 'nekobench'"),
    (f"--bench {SMALL} --bench generic", "--items x", "must say whose it is"),
    (f"--bench {SMALL} --bench generic", "--slices SAF", "leaves nothing of"),
    (f"--bench {SMALL} --bench generic", "--slices X", "no bench has a slice 'X'"),
    ("--compat nekobench", "", "reads one file"),
    ("--compat nekobench --items neko.json", "--judge j@URL", "no prompts for a judge"),
    *((f"--bench {SMALL}", *case) for case in (
        ("--server URL", "give arms with --arm"),
        ("--fail-on better", "--fail-on 'better'"),
        ("--fail-on KIR<0", "no slice 'KIR'"),
        ("--slices NOPE", "no slice 'NOPE'"),
        *((f"--slices '{text}'", "names no slice") for text in (",", "", " , ")),
        ("--judge j", "judge 'j' is not of the form"),
        ("--judge-pairs", "needs a judge"),
        ("--judge j@URL --no-judge", "contradict"),
        ("--judge-extra-body {}", "--judge-extra-body needs a judge"),
        ("--judge j@URL --judge-extra-body x", "--judge-extra-body is not JSON"),
        ("""--judge j@URL --judge-extra-body '{"n": 2}'""", "sets n, which judging"),
        ("--resume", "there is no run in"),
        ("--extra-body x", "not JSON"),
        ("""--extra-body '{"max_tokens": 9}'""", "give --max-tokens N instead"),
        ("--partner guest@URL", "no bench here has dialogues"),
        ("--arm base", "NAME=MODEL@URL"),
    )),
]  # fmt: skip


def test_what_makes_no_sense_is_told_before_any_request(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "neko.json").write_text('[{"module": "SAF", "question": "a"}]')
    arms = arm_words(server)
    small = ["--bench", SMALL, "--out", "out"]
    cases = [
        ([*shlex.split(f"{bench} --out out {more}".replace("URL", server.url)), *arms], said)
        for bench, more, said in SENSELESS
    ]
    cases += [(small, "give arms with --arm")]
    cases += [([*small, "--server", "localhost:80"], "--server http://localhost:80")]
    for words, said in cases:
        done = invoke(*words)
        assert done.exit_code == 2, (words, done.output)
        assert said in done.output, (words, done.output)
    done = invoke(*small, "--server", "http://127.0.0.1:9")
    assert done.exit_code == 1
    assert "does not answer (connection refused)" in done.output
    assert "next: start the server" in done.output
    # A judge that isn't there is found out before the arms are asked.
    done = invoke(*small, *arms, "--judge", f"judge@{server.url}")
    assert done.exit_code == 1
    assert "KTB871" in done.output
    assert not any(one["model"].startswith("tiny") for one in server.requests)
    assert not (tmp_path / "out").exists()


def test_benches_in_one_directory(server, tmp_path):
    arms = arm_words(server)
    words = ["--out", tmp_path / "out", "--limit", 4, "--no-judge", "--concurrency", 8]
    done = invoke("--bench", SMALL, "--bench", "generic", *words, *arms)
    assert done.exit_code == 0, done.output
    folders = read_benches(tmp_path / "out")
    assert [one.name for one in folders] == ["nekobench", "generic"]
    for folder in folders:
        assert score_run(folder)["asked"] == 4
    # One of them alone goes to its own folder, and the list stays.
    asked = len(server.requests)
    gate = ["--fail-on", "low(task:overall)<-1", "--fail-on", "persona:overall<2", "--resume"]
    again = invoke("--bench", SMALL, *words, *arms, *gate)
    assert again.exit_code == 1
    assert "KTB840" in again.output
    assert "persona:overall<2" in again.output
    assert "low(task:overall)<-1" not in again.output
    assert not any(is_item(one) for one in server.requests[asked:])
    assert read_benches(tmp_path / "out") == folders
    run(server, tmp_path / "single", limit=2)
    single = invoke("--bench", SMALL, "--bench", "generic", "--out", tmp_path / "single", *arms, "--dry-run")
    assert "holds the run of one bench" in single.output
    for damage in ("[", '{"schema": "ktbridge.benches/1", "benches": ["../x"]}'):
        (tmp_path / "out" / "benches.json").write_text(damage)
        with pytest.raises(KtbridgeError, match="not a list of benches"):
            read_benches(tmp_path / "out")


def test_the_public_questions_are_asked_as_they_are(server, tmp_path):
    rows = [{"module": "SAF", "question": f"问题{n}"} for n in range(6)]
    rows += [{"module": "PES", "question": f"你好{n}"} for n in range(6)]
    (tmp_path / "neko.json").write_text(json.dumps(rows), "utf-8")
    words = ["--compat", "nekobench", "--items", tmp_path / "neko.json", "--no-judge"]
    arms = ["--arm", server.arms[0], "--arm", server.arms[2]]
    done = invoke(*words, *arms, "--out", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["bench"]["name"] == "nekobench-compat"


@pytest.mark.slow
def test_a_judge_is_asked_after_the_arms_and_its_failure_costs_no_report(server, tmp_path):
    server.listed = [*server.listed, {"id": "judge"}]

    def behave(request, nth):
        if request["model"] != "judge":
            return None
        text = json.dumps(request["messages"], ensure_ascii=False)
        canary = "2 + 2" in text
        count = max(int(one) for one in re.findall(r"q(\d+): ", text))
        says = {
            f"q{n}": {"evidence": "e", "verdict": "yes" if n == 1 or not canary else "no"}
            for n in range(1, count + 1)
        }
        return 200, {}, server.completion(json.dumps(says))

    server.behave = behave
    words = ["--bench", "nekobench", "--slices", "PES,CTRL", "--limit", 8, "--out", tmp_path]
    words += ["--arm", server.arms[0], "--arm", server.arms[2], "--concurrency", 8]
    judge = ["--judge", f"judge@{server.url}"]
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    assert "have questions for a judge" in done.output
    assert "judge" not in {one["model"] for one in server.requests}
    server.requests.clear()
    done = invoke(*words, *judge)
    assert done.exit_code == 1, "it says yes to everything"
    assert "KTB878" in done.output
    assert (tmp_path / "report.html").is_file()
    judged = sum(one["model"] == "judge" for one in server.requests)
    assert judged >= 8 + 1
    assert sum(is_item(one) for one in server.requests if one["model"] != "judge") == 0
    results = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert results["judge"]["model"] == "judge"
    # What stops the judge is told by the exit code, after a report of everything else.
    server.requests.clear()
    (tmp_path / "report.html").unlink()
    with Ledger(tmp_path, JUDGEMENTS):
        done = invoke(*words, *judge)
    assert done.exit_code == 1
    assert "another `ktbridge eval` is writing to" in done.output
    assert (tmp_path / "report.html").is_file()
    assert sum(one["model"] == "judge" for one in server.requests) == 1, "only the canary"
    # Without questions among what is asked there is nothing to judge, and that is no failure.
    other = [str(word).replace("PES,CTRL", "CTRL") for word in words]
    other[other.index(str(tmp_path))] = str(tmp_path / "other")
    done = invoke(*other, *judge)
    assert done.exit_code == 0, done.output
    assert "nothing of it is for a judge" in done.output
