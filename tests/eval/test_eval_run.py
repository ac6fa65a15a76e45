"""Runs against a real HTTP server that behaves, and against servers that don't."""

from __future__ import annotations

import json

import pytest
from evalruns import BENCH, is_item, knows, prompt_of, run, stored
from findings import codes

from ktbridge.errors import KtbridgeError, ProblemsError, UsageError
from ktbridge.eval import failures, score_run, write_report
from ktbridge.eval.bench import FILES, with_max_tokens, with_sampling
from ktbridge.eval.store import ANSWERS, Ledger, read_ledger

# --- what is sent and what is reused


def test_requests_say_what_the_bench_says(server, tmp_path):
    run(server, tmp_path, slices=("CTRL",), limit=None)
    letter = next(item for item in BENCH.items if item.sub == "letter")
    messages, limit = (
        [{"role": "user", "content": letter.messages[0]["content"]}],
        letter.max_tokens,
    )
    items = [one for one in server.requests if is_item(one) and one["model"] == "tiny"]
    (sent,) = [one for one in items if one["messages"] == messages]
    sampling = {"temperature": 0, "top_p": 1, "seed": 0}
    assert sent == {"model": "tiny", "messages": messages, **sampling, "max_tokens": limit}


def test_nothing_is_asked_twice_and_the_run_card_is_whole(server, tmp_path):
    told = []
    first = run(server, tmp_path, on_preflight=told.append)
    # The share of identical probes is told.
    pairs = [["base", "expert"], ["base", "full"], ["expert", "full"]]
    assert [pair["arms"] for pair in first.identical] == pairs
    assert told[0].identical == first.identical
    assert all(pair["n"] == 8 and 0 <= pair["share"] < 1 for pair in first.identical)
    card = json.loads((tmp_path / "run.json").read_text("utf-8"))
    assert list(card["arms"]) == ["base", "expert", "full"]
    assert len({arm["fingerprint"] for arm in card["arms"].values()}) == 3
    for name in FILES:
        assert (tmp_path / "bench" / name).read_bytes() == BENCH.files[name]
    again = run(server, tmp_path)
    assert (first.asked, first.stored) == (48, 0)
    assert (again.asked, again.stored) == (0, 48)
    assert sum(is_item(request) for request in server.requests) == 48
    wider = run(server, tmp_path, limit=24)
    assert (wider.asked, wider.stored) == (24, 48)


def test_arms_may_come_one_by_one(server, tmp_path):
    for arm in server.arms:
        run(server, tmp_path / "apart", arms=[arm])
    run(server, tmp_path / "together")
    assert score_run(tmp_path / "apart") == score_run(tmp_path / "together")


def test_scoring_again_needs_no_server(server, tmp_path):
    run(server, tmp_path)
    before = score_run(tmp_path)
    persona = tmp_path / "bench" / "persona.yaml"
    persona.write_text(persona.read_text("utf-8").replace("target_rate: 0.5", "target_rate: 1"))
    after = score_run(tmp_path)
    means = [one["tables"]["persona"]["overall"]["full"]["mean"] for one in (before, after)]
    assert means[1] < means[0]


# --- servers that misbehave


@pytest.mark.parametrize(
    ("tries", "fault"),
    [(6, (500, {}, {"error": {"message": "boom"}})), (1, (200, {}, b"<html>please log in</html>"))],
    ids=["may pass", "won't"],
)
def test_what_may_pass_is_tried_again_and_nothing_of_it_is_scored_or_cached(server, tmp_path, tries, fault):
    """Which kinds of replies are which: tests/golden/clients.py."""
    sick = BENCH.select(("PES",))[1].messages[0]["content"]
    shaky = BENCH.select(("PES",))[2].messages[0]["content"]

    def behave(request, nth):
        if is_item(request) and (prompt_of(request) == sick or (prompt_of(request) == shaky and nth == 1)):
            return fault
        return None

    server.behave = behave
    arms = server.arms[:2]
    done = run(server, tmp_path, arms=arms, slices=("PES",), limit=None)
    failed = 2 if tries > 1 else 4
    assert done.outcomes == {"ok": 28 - failed, "http-error": failed}
    asked = [request for request in server.requests if prompt_of(request) == sick]
    assert len(asked) == 2 * tries, "of each of two arms"
    results = score_run(tmp_path)
    (row,) = [row for row in results["items"] if row["messages"][0]["content"] == sick]
    assert row["answers"]["base"]["outcome"] == "http-error"
    assert row["answers"]["base"]["detail"]
    assert "task" not in row["answers"]["base"]
    assert results["valid"] == 14 - failed // 2
    assert {one["code"] for one in results["warnings"]} >= {"KTB820"}
    server.behave = lambda request, nth: None
    again = run(server, tmp_path, arms=arms, slices=("PES",), limit=None)
    assert (again.asked, again.outcomes) == (failed, {"ok": 28})
    assert score_run(tmp_path)["valid"] == 14


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ((200, {"content-type": "application/json", "content-length": "999"}, b"{"), "stored"),
        ((429, {}, {"error": {"message": "insufficient_quota"}}), "add credit"),
    ],
    ids=["it died", "quota"],
)
def test_a_server_that_is_gone_ends_the_run_and_the_next_one_goes_on(server, tmp_path, fault, words):
    server.behave = lambda request, nth: fault if sum(map(is_item, server.requests)) > 20 else None
    with pytest.raises(KtbridgeError, match="stopped answering") as caught:
        run(server, tmp_path, concurrency=2)
    assert words in caught.value.next_step
    stored = sum(one["outcome"] == "ok" for one in read_ledger(tmp_path, ANSWERS).values())
    assert 18 <= stored <= 20
    server.behave = lambda request, nth: None
    assert run(server, tmp_path).stored == stored


def test_empty_truncated_and_thinking_answers_are_named(server, tmp_path):
    texts = [item.messages[0]["content"] for item in BENCH.select(("CF",))]
    odd = {
        texts[1]: server.completion(""),
        texts[2]: server.completion(None),
        texts[3]: server.completion("好的，", "length"),
        texts[4]: server.completion("", "length", reasoning_content="用户想要……"),
        texts[5]: server.completion("<think>喵主人</think>好的。"),
    }

    def behave(request, nth):
        reply = odd.get(prompt_of(request)) if request["model"] == "tiny:neko" else None
        return reply and (200, {}, reply)

    server.behave = behave
    run(server, tmp_path, slices=("CF",), limit=None)
    results = score_run(tmp_path)
    assert results["outcomes"]["base"] == {"ok": 10}
    assert results["outcomes"]["full"] == {"ok": 6, "truncated": 1, "think-only": 1, "empty": 2}
    assert results["valid"] == 6
    assert results["tables"]["persona"]["CF"]["base"]["n"] == 6, "only items valid in every arm"
    assert {one["code"] for one in results["warnings"]} == {"KTB820", "KTB821"}
    answer = results["items"][5]["answers"]["full"]
    assert (answer["text"], answer["thinking"], answer["persona"]) == ("好的。", "喵主人", 0.0)


# --- preflight fails closed


def takes_any_name(server, request):
    return server.completion(server.plain("tiny", prompt_of(request)))


def does_not_apply_an_adapter(server, request):
    if "no-such" in request["model"]:
        return None
    model = "tiny" if request["model"] == "tiny:neko" else request["model"]
    return server.completion(server.plain(model, prompt_of(request)))


def has_another_template_for_an_arm(server, request):
    if request["model"] != "tiny":
        return None
    body = server.completion(server.plain("tiny", prompt_of(request)))
    body["usage"]["prompt_tokens"] += 4
    return body


@pytest.mark.parametrize(
    ("fault", "errors", "asked"),
    [
        (takes_any_name, [("KTB803", "arm base"), ("KTB803", "arm full")], 2),
        (does_not_apply_an_adapter, [("KTB806", "arms expert and full")], 2 + 8 * 3),
        (
            has_another_template_for_an_arm,
            [("KTB807", "arms base and expert"), ("KTB807", "arms expert and full")],
            2 + 8 * 3,
        ),
    ],
)
def test_a_server_that_cannot_be_trusted_is_asked_no_item(server, tmp_path, fault, errors, asked):
    def behave(request, nth):
        body = fault(server, request)
        return body and (200, {}, body)

    server.behave = behave
    with pytest.raises(ProblemsError) as caught:
        run(server, tmp_path)
    found = [one for one in caught.value.problems if one.severity == "error"]
    assert [(one.code, one.where) for one in found] == errors
    assert len(server.requests) == asked
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize(("status", "code"), [(500, "KTB804"), (401, "KTB819")])
def test_a_server_that_fails_on_an_invented_name_proves_nothing(server, tmp_path, status, code):
    server.behave = lambda request, nth: (
        (status, {}, {"error": "no"}) if "no-such" in request["model"] else None
    )
    with pytest.raises(ProblemsError) as caught:
        run(server, tmp_path)
    assert codes(caught) == {code}


GOOD = object()


@pytest.mark.parametrize(
    ("fault", "code", "asked", "words"),
    [
        ((401, {}, {"error": "key"}), "KTB819", 1, "KTBRIDGE_API_KEY"),
        ((402, {}, {"error": "Insufficient Balance"}), "KTB819", 1, "add credit"),
        ((429, {}, {"error": {"message": "no", "code": "insufficient_quota"}}), "KTB819", 1, "add credit"),
        ((200, {}, b"<html>login</html>"), "KTB818", 1, "URL of the API"),
        ((200, {}, b'data: {"choices": []}'), "KTB818", 1, "streaming"),
        ((200, {"content-encoding": "gzip"}, b"\x1f\x8b"), "KTB818", 1, "no chat completion"),
        ((200, {}, {"choices": []}), "KTB818", 1, "no chat completion"),
        ((400, {}, {"error": "'temperature' does not support 0"}), "KTB805", 1, "are then sampled"),
        ((400, {}, {"error": "no system role"}), "KTB805", 2, "refuses these requests"),
        ((429, {"retry-after": "soon"}, {"error": "slow down"}), "KTB805", 4, "--concurrency"),
        ((503, {}, {"error": "busy"}), "KTB805", 4, "server's log"),
        (({}, GOOD), "KTB805", 8, "reasoning"),
    ],
)  # fmt: skip
def test_an_arm_that_cannot_answer_is_said_after_its_first_probes(
    server, tmp_path, fault, code, asked, words
):
    """98 requests and two minutes before a word, in 0.6.0."""

    def behave(request, nth):
        if request["model"] != "tiny":
            return None
        if fault[-1] is GOOD:
            return 200, {}, server.completion(None, reasoning_content=server.plain("tiny", "x"))
        return fault

    server.behave = behave
    problems = []
    try:
        problems += run(server, tmp_path).problems
    except ProblemsError as error:
        problems += error.problems
        assert sum(map(is_item, server.requests)) == 0
    (problem,) = problems
    assert (problem.code, problem.severity, problem.where) == (code, "error", "arm expert")
    assert words in problem.found + problem.next_step
    assert sum(one["max_tokens"] == 32 for one in server.requests if one["model"] == "tiny") == asked


def test_what_the_request_switched_off_is_no_advice(server, tmp_path):
    server.behave = lambda request, nth: (
        None
        if "no-such" in request["model"]
        else (200, {}, server.completion(None, reasoning_content=request["model"]))
    )
    for fields, words in (
        ({}, "switch thinking off"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "without its reasoning parser"),
        ({"reasoning_effort": "none"}, "without its reasoning parser"),
    ):
        with pytest.raises(ProblemsError) as caught:
            run(server, tmp_path, bench=with_sampling(BENCH, fields))
        assert {one.code for one in caught.value.problems} == {"KTB805"}
        assert all(words in one.next_step for one in caught.value.problems)


def test_the_limit_may_go_by_its_other_name_alone(server, tmp_path):
    server.behave = lambda request, nth: (
        (400, {}, {"error": "Unsupported parameter: 'max_tokens'"}) if "max_tokens" in request else None
    )
    bench = with_sampling(BENCH, {"max_tokens": None, "max_completion_tokens": 200})
    done = run(server, tmp_path, bench=bench)
    assert (done.outcomes, done.faults) == ({"ok": 48}, {})
    limits = [one.get("max_completion_tokens") for one in server.requests if "seed" in one]
    assert sorted(set(limits)) == [32, 200]
    notes = []
    again = run(server, tmp_path / "by-itself", on_preflight=lambda found: notes.extend(found.notes))
    assert (again.outcomes, again.faults) == ({"ok": 48}, {})
    assert "max_completion_tokens" in notes[0]
    for fields in ({"max_tokens": None}, {"max_tokens": 5}, {"max_completion_tokens": "5"}):
        with pytest.raises(UsageError, match="max_"):
            with_sampling(BENCH, fields)
    with pytest.raises(UsageError, match="both set the limit"):
        with_max_tokens(bench, 5)


@pytest.mark.parametrize("listed", [None, "tiny", [{"name": "tiny"}], [3], "closed"])
def test_no_list_of_models(server, tmp_path, listed):
    server.listed = listed
    if listed == "closed":
        server.close()
    with pytest.raises(ProblemsError) as caught:
        run(server, tmp_path)
    (problem,) = caught.value.problems
    assert problem.code == "KTB801"
    assert ("does not answer" in problem.found) == (listed == "closed")
    assert str(problem).count(server.url) == 1


@pytest.mark.slow
def test_an_arm_that_says_nothing_is_left_out_and_the_others_are_asked(server, tmp_path):
    silent = {"tiny"}

    def behave(request, nth):
        return (200, {}, server.completion("")) if request["model"] in silent else None

    server.behave = behave
    done = run(server, tmp_path)
    assert [(one.code, one.severity, one.where) for one in done.problems] == [
        ("KTB805", "error", "arm expert")
    ]
    assert (done.asked, done.outcomes) == (32, {"ok": 32})
    results = write_report(tmp_path)
    assert results["left_out"] == ["expert"]
    assert "answered with nothing" in results["refused"]["expert"]
    assert [one["code"] for one in results["warnings"] if one["severity"] == "error"] == ["KTB823"]
    assert (results["plan"]["missing_items"], results["valid"]) == (0, 16)
    # It is asked like any other once it has something to say.
    silent.clear()
    assert run(server, tmp_path).asked == 16
    assert failures(write_report(tmp_path)) == []
    silent |= {"tiny", "tiny:base", "tiny:neko"}
    with pytest.raises(ProblemsError) as caught:
        run(server, tmp_path / "all")
    assert codes(caught) == {"KTB805"}


def test_another_model_behind_the_same_name_is_noticed(server, tmp_path):
    run(server, tmp_path)

    def behave(request, nth):
        if request["model"] != "tiny":
            return None
        return 200, {}, server.completion("别的回答。" + prompt_of(request))

    server.behave = behave
    with pytest.raises(ProblemsError) as caught:
        run(server, tmp_path)
    assert codes(caught) == {"KTB808"}


def test_answers_of_two_models_under_one_name_are_told_in_the_report(server, tmp_path):
    """A model that has changed a little, so that the run isn't stopped."""
    run(server, tmp_path, limit=16)
    other = {item.messages[-1]["content"] for item in BENCH.select(limit=8)[:3]}

    def behave(request, nth):
        if request["model"] != "tiny" or prompt_of(request) not in other:
            return None
        return 200, {}, server.completion("别的回答。" + prompt_of(request))

    server.behave = behave
    run(server, tmp_path, limit=24)
    server.behave = lambda request, nth: None
    run(server, tmp_path, limit=24)
    told = [one for one in write_report(tmp_path)["warnings"] if one["code"] == "KTB808"]
    assert len(told) == 1
    assert "3 of 8 probe answers differ from those of the stored run" in told[0]["found"]


# --- the store


def test_a_torn_last_line_is_dropped_and_a_damaged_one_is_named(server, tmp_path):
    run(server, tmp_path)
    path = tmp_path / "answers.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert len(read_ledger(tmp_path, ANSWERS)) == 47
    assert run(server, tmp_path).asked == 1

    def told(data):
        records = [json.loads(line) for line in data.splitlines()]
        return sorted(json.dumps(one | {"seconds": one["seconds"] >= 0}) for one in records)

    assert told(path.read_bytes()) == told(whole)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], lines[1][:30], *lines[2:]]))
    with pytest.raises(KtbridgeError, match="damaged at line 2"):
        score_run(tmp_path)


RECORD = {"key": "k", "outcome": "ok", "text": "a", "thinking": "", "detail": ""}
NO_RECORDS = (
    {**RECORD, "text": None},
    {**RECORD, "outcome": []},
    {**RECORD, "outcome": "fine"},
    {"key": "k"},
)
CARD = ("name", "model", "url", "fingerprint", "server", "sampling")


@pytest.mark.parametrize("broken", [*NO_RECORDS, *CARD], ids=str)
def test_a_damaged_record_or_card_is_said_so(tmp_path, broken):
    stored(tmp_path, {"base": knows}, items=BENCH.items[:1])
    if isinstance(broken, dict):
        lines = "".join(json.dumps(one) + "\n" for one in (RECORD, broken))
        (tmp_path / "answers.jsonl").write_text(lines, "utf-8")
    else:
        document = json.loads((tmp_path / "run.json").read_text("utf-8"))
        del document["arms"]["base"][broken]
        (tmp_path / "run.json").write_text(json.dumps(document), "utf-8")
    with pytest.raises(KtbridgeError, match="damaged"):
        score_run(tmp_path)


def test_half_a_character_in_a_servers_list_is_refused(server, tmp_path):
    server.listed = [{**entry, "root": "\ud83d"} for entry in server.listed]
    with pytest.raises(ProblemsError):
        run(server, tmp_path)


def test_one_writer_at_a_time(server, tmp_path):
    with Ledger(tmp_path, ANSWERS), pytest.raises(KtbridgeError, match="another `ktbridge eval`"):
        run(server, tmp_path)
    assert run(server, tmp_path).asked == 48


def test_a_directory_without_a_run(tmp_path):
    with pytest.raises(KtbridgeError, match="no evaluation"):
        write_report(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(KtbridgeError, match="not a run's description"):
        write_report(tmp_path)


def test_an_arm_like_the_base_in_its_probes_is_asked_where_the_last_one_differs(server, tmp_path):
    def behave(request, nth):
        if request["model"] != "tiny" or "no-such" in request["model"]:
            return None
        return (200, {}, server.completion(server.plain("tiny:base", prompt_of(request))))

    server.behave = behave
    done = run(server, tmp_path)
    assert done.asked == 3 * 16
    found = [(one.code, one.where, one.severity) for one in done.problems]
    assert ("KTB806", "arms base and expert", "warning") in found
