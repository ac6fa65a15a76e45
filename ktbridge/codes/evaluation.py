"""Findings of ``ktbridge eval``: preflight, input files, answers, judge."""

from __future__ import annotations

from ktbridge.codes.table import Code, Subject

_BENCH = "edit bench.yaml"
_BY_HAND = "see its server's log"
_JUDGE = "choose another judge, see docs/judge.md"
_MORE_PAIRS = "another judge may decide more of the pairs, see docs/judge.md"

ARMS = Subject("The arms' servers", "eval", (
    Code("KTB801", "error", "a server doesn't list its models", "start it, or correct the URL in --arm"),
    Code("KTB802", "error", "a server doesn't list the model of an arm or of the partner in dialogues",
         "name a listed model in --arm or --partner, or serve the adapter under that name"),
    Code("KTB803", "error", "a server answers for an adapter that doesn't exist",
         "it would answer as the base model for a mistyped name too: serve with an engine that checks adapter"
         " names"),
    Code("KTB804", "error", "asked for an adapter that doesn't exist, a server gives another error than HTTP"
         " 400, 404 or 422", _BY_HAND),
    Code("KTB805", "error", "probes failed or got no answer but reasoning, or the largest request is refused"
         " (a warning where other probes or the smallest request are answered)",
         "try the model by hand: its chat template or its weights may be at fault"),
    Code("KTB806", "error", "an adapter is not applied: all probe answers are those of another arm",
         "run `ktbridge verify`, and see whether the server loaded the adapter"),
    Code("KTB807", "error", "arms make different numbers of tokens from the same messages",
         "serve all arms with the same tokenizer and chat template"),
    Code("KTB808", "warning", "probe answers differ from those of the stored run (an error where more than"
         " half do)", "use another --output for a changed model; stored answers are the old one's"),
    Code("KTB809", "warning", "the stored dialogues of an arm were held with another partner",
         "ask this arm again with the same --partner"),
    Code("KTB816", "error", "an arm's model is not what the arm's name says: its server tells of an adapter"
         " in the base, or of none or half in the other (a warning for other names of arms)",
         "name the model that is meant in --arm, or give the arm another name"),
    Code("KTB817", "error", "two arms are one model, under one name or two (a warning where neither is the"
         " last arm, or where only the path on the server is the same)",
         "name another model for one of them, or leave one out"),
    Code("KTB818", "error", "a server's replies are no chat completions: a page, events, damaged JSON (a"
         " warning where other probes were answered)",
         "give the URL of the API itself, what stands before /v1"),
    Code("KTB819", "error", "a server doesn't let this key ask: a missing or wrong key, no quota or credit",
         "set KTBRIDGE_API_KEY to a key that may ask, or add credit to its account"),
))  # fmt: skip

BENCHES = Subject("Benches and their files", "eval", (
    Code("KTB810", "error", "a file of the bench is no YAML in UTF-8", "edit the file"),
    Code("KTB811", "error", "a key of bench.yaml is missing, unknown or has a wrong value", _BENCH),
    Code("KTB812", "error", "items.jsonl has a line that is no JSON, or no items",
         "write one JSON object per line"),
    Code("KTB813", "error", "an item has a wrong value, or the id of an earlier one", "edit items.jsonl"),
    Code("KTB814", "error", "a key of persona.yaml is missing, unknown or has a wrong value",
         "edit persona.yaml"),
    Code("KTB815", "error", "a file of questions isn't in the layout of its loader",
         "use an unchanged copy"),
))  # fmt: skip

ANSWERS = Subject("The answers", "eval", (
    Code("KTB820", "warning", "answers of an arm can't be scored (an error where fewer than half can, or more"
         " than 5 % of the requests failed)",
         "run the same command again, which asks only for what is missing"),
    Code("KTB821", "warning", "arms differ in how many answers are ok (an error where a later arm has none in"
         " a slice of five or more)",
         "follow KTB820 for the arm with fewer, else read the comparison with care"),
    Code("KTB822", "warning", "90 % and more of two arms' answers are identical (an error where all of 8 or"
         " more are)", "run `ktbridge verify`"),
    Code("KTB823", "error", "an arm is left out of the comparison: it has no answers",
         "run the same eval again with this arm, or delete it from run.json"),
    Code("KTB824", "warning", "few answers of a slice hold the letter, number or JSON to mark",
         "look at these answers: a low score here is a failure of format first"),
    Code("KTB825", "warning", "items of the bench are in the training data",
         "take these items out of the training data, or read this slice as memory"),
    Code("KTB826", "warning", "a difference between arms is no more than the noise of repeats",
         "ask more repeats, or a server that answers the same every time"),
    Code("KTB827", "error", "planned items or repeats were not asked",
         "run the same command again, which asks only for what is missing; or ask for fewer items with"
         " --limit or --slices"),
    Code("KTB828", "error", "a scorer failed on answers, which are left out for all arms",
         "report this with the answer; `ktbridge report` scores again once it is corrected"),
    Code("KTB840", "error", "the results fail a --fail-on condition",
         "see the report for the items that moved"),
))  # fmt: skip

JUDGE = Subject("The judge", "eval", (
    Code("KTB870", "warning", "the judge's server doesn't list its models",
         "start its server, or correct the URL in --judge"),
    Code("KTB871", "error", "the judge's server doesn't list the judge", "name a listed model"),
    Code("KTB872", "error", "the judge doesn't answer a test question, or not in the form asked for",
         "choose a judge that keeps to a form; where it thinks first, --judge-extra-body can raise max_tokens"
         " or switch that off"),
    Code("KTB873", "warning", "the judge answers a test question wrongly",
         "choose a stronger judge, see docs/judge.md"),
    Code("KTB874", "error", "an anchor in bench.yaml has a wrong value", _BENCH),
    Code("KTB875", "warning", "the bench has no anchors, so nothing shows what the judge is worth",
         "add `anchors` to the slices of bench.yaml, see eval/README.md"),
    Code("KTB876", "error", "the judge fails on anchors, or judged none: its judgements are left out",
         _JUDGE),
    Code("KTB877", "warning", "the judge does no better than a coin on the anchors of one slice",
         "do not rely on its judgements of this slice"),
    Code("KTB878", "warning", "the judge nearly always gives the same answer (an error where the anchors show"
         " that it is wrong)", _JUDGE),
    Code("KTB879", "warning", "more than 5 % of the judge's replies can't be read (an error where none can)",
         "choose a judge that keeps to a form, or a server that takes response_format"),
    Code("KTB880", "warning", "judgements failed (an error above 5 %)",
         "see its server's log and run the same command again; only these are asked again"),
    Code("KTB881", "warning", "position bias: the judge prefers the answer shown first, or second",
         _MORE_PAIRS),
    Code("KTB882", "warning", "many of the judge's comparisons change with the order", _MORE_PAIRS),
    Code("KTB883", "warning", "length bias: the judge prefers longer answers",
         "look at answers where the longer one lost, and at the lengths by arm"),
    Code("KTB884", "warning", "the judge is of the family that it judges",
         "run once more with a judge of another family and compare"),
    Code("KTB885", "error", "the judge was not asked for all judgements",
         "run the same `ktbridge eval --judge` again; it goes on where it stopped"),
    Code("KTB886", "error", "the judge fails on known pairs: its comparisons are left out", _JUDGE),
    Code("KTB887", "warning", "no item that was answered has questions for a judge",
         "give some a `judge`, see eval/README.md, or leave --judge out"),
))  # fmt: skip

SUBJECTS = (ARMS, BENCHES, ANSWERS, JUDGE)
