"""The benches' driver: processes that take turns, what is kept of them, what is said of one that fails."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner


@pytest.fixture
def contestant(tmp_path):
    """``contestant(name, turn)``: one whose turn is this Python expression; it logs its turns."""
    from peers.driver import Contestant

    def make(name: str, turn: str, **more: object) -> Contestant:
        module = tmp_path / f"module_{name}.py"
        module.write_text(
            "import os, sys\n"
            "from peers.worker import serve\n"
            "class One:\n"
            "    about = {'version': '3'}\n"
            "    turns = 0\n"
            "    def turn(self):\n"
            "        self.turns += 1\n"
            f"        with open({str(tmp_path / 'turns')!r}, 'a') as file: file.write({name!r})\n"
            f"        return {turn}\n"
            "serve(lambda spec: One())\n"
        )
        return Contestant(name, module.stem, path=str(tmp_path), **more)

    return make


def test_turns_alternate_and_all_that_counts_is_kept(contestant, tmp_path):
    from peers.driver import compete, new_run

    run = new_run(repeat=4)
    turn = "{'seconds': float(self.turns)}"
    compete(run, [contestant("a", turn), contestant("b", turn)], warmups=1, repeat=4)
    assert (tmp_path / "turns").read_text() == "abbaabbaab"
    assert run["failed"] == run["skipped"] == []
    assert [entry["name"] for entry in run["contestants"]] == ["a", "b"]
    for entry in run["contestants"]:
        assert entry["samples"] == {"seconds": [2, 3, 4, 5]}
        assert entry["median"] == {"seconds": 3.5}
        assert entry["quartiles"] == {"seconds": [2.75, 4.25]}
        assert entry["version"] == "3"
    assert run["machine"].keys() >= {"cpu", "cores", "load"}
    json.dumps(run, allow_nan=False)


def test_one_that_fails_leaves_the_others_and_is_told_in_a_sentence(contestant):
    from peers.driver import Contestant, compete, new_run

    run = new_run()
    good = contestant("good", "{'seconds': 1.0}")
    others = [
        contestant("raises", "{}[self.turns]"),
        contestant("dies", "sys.exit(print('a last word', file=sys.stderr) or 3)"),
        contestant("killed", "os.kill(os.getpid(), 9)"),
        Contestant("nowhere", "peers.worker", python="/no/such/python"),
        Contestant("empty", "no_such_module"),
    ]
    compete(run, [*others, good], warmups=0, repeat=2)
    (entry,) = run["contestants"]
    assert (entry["name"], entry["samples"]) == ("good", {"seconds": [1.0, 1.0]})
    said = {sentence.split()[0]: sentence for sentence in run["failed"]}
    assert said["raises"] == "raises failed: KeyError: 1"
    assert said["dies"] == "dies died (exit code 3): a last word"
    assert said["killed"] == "killed died (SIGKILL)"
    assert said["nowhere"].startswith("nowhere could not be started: ")
    assert said["empty"].endswith("No module named no_such_module")


def test_programs_are_measured_by_the_process_they_are(tmp_path):
    from peers.driver import Worker, WorkerError, program

    out = tmp_path / "out"
    words = [
        sys.executable,
        "-S",
        "-c",
        f"open({str(out)!r}, 'a').write('x' * len(bytearray(50 << 20)))",
    ]
    with Worker(program("fills", words)) as worker:
        took = worker.ask("turn")
    assert out.stat().st_size == 50 << 20
    assert took["peak"] > 50 << 20
    assert took["cpu"] > 0
    assert took["seconds"] > 0
    with Worker(program("false", ["false"])) as worker, pytest.raises(WorkerError, match="with 1"):
        worker.ask("turn")


def test_commands_stand_beside_their_peers(tmp_path):
    import bench_convert

    arguments = ["--layers", "4", "--experts", "4", "--repeat", "1", "--no-touch", "--no-validate"]
    done = CliRunner().invoke(
        bench_convert.main,
        [*arguments, "--dir", str(tmp_path), "--json", str(tmp_path / "run.json")],
    )
    assert done.exit_code == 0, done.output
    run = json.loads((tmp_path / "run.json").read_text())
    assert [entry["name"] for entry in run["contestants"]] == [
        "cp",
        "cp + sync",
        "ktbridge convert",
    ]
    assert run["tensors"] == 6 * 4 * 4 + 2 * (3 * 5 + 4)
    assert run["contestants"][2]["median"]["peak"] > 10 << 20
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
