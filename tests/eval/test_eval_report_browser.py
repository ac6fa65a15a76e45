"""The page in a real browser: it sorts, filters, fits a phone, opens up for print, runs no answer.

Needs a Chromium: KTBRIDGE_CHROMIUM names the binary, else one on PATH is taken. A page of our own
holds the report in a frame as wide as a phone, works its controls and writes down what it sees.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess

import pytest
from evalruns import BENCH, EVIL, knows, stored

from ktbridge.eval import write_report

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
CHROMIUM = os.environ.get("KTBRIDGE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)

DRIVER = """<!doctype html><meta charset="utf-8">
<iframe id="page" src="report.html#slice=SAF" style="width:390px;height:800px;border:0"></iframe>
<pre id="seen"></pre>
<script>
const frame = document.getElementById("page");
const seen = { alerts: 0 };
frame.onload = () => {
  const view = frame.contentWindow, page = frame.contentDocument;
  view.alert = () => { seen.alerts += 1; };
  const $ = id => page.getElementById(id);
  const shown = () => [...page.querySelectorAll("article:not([hidden])")];
  const set = (id, value, kind = "change") => {
    $(id).value = value;
    $(id).dispatchEvent(new view.Event(kind));
  };
  seen.from_address = shown().map(one => one.dataset.slice);
  seen.width = page.documentElement.scrollWidth;
  seen.unlabeled = [...page.querySelectorAll("select, input")].filter(one => !one.labels.length).length;
  const drawn = one => one.getBoundingClientRect().height > 60;
  seen.charts = [...page.querySelectorAll("svg.chart")].filter(drawn).length;
  set("slice", "");
  set("order", "+task");
  seen.task = shown().map(one => Number(one.dataset.task));
  set("outcome", "empty");
  seen.empty = shown().length;
  set("outcome", "");
  set("find", "onerror=alert", "input");
  setTimeout(() => {
    seen.found = shown().length;
    seen.count = $("count").textContent;
    seen.address = view.location.hash;
    seen.marked = view.getComputedStyle(page.querySelector("ins")).backgroundColor;
    $("differ").click();
    seen.unmarked = view.getComputedStyle(page.querySelector("ins")).backgroundColor;
    seen.closed = page.querySelectorAll("details:not([open])").length;
    view.dispatchEvent(new view.Event("beforeprint"));
    seen.closed_in_print = page.querySelectorAll("details:not([open])").length;
    view.dispatchEvent(new view.Event("afterprint"));
    seen.closed_after = page.querySelectorAll("details:not([open])").length;
    $("find").blur();
    page.body.dispatchEvent(new view.KeyboardEvent("keydown", { key: "/", bubbles: true }));
    seen.focus = page.activeElement.id;
    document.getElementById("seen").textContent = JSON.stringify(seen);
  }, 400);
};
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; KTBRIDGE_CHROMIUM may name one")
def test_the_page_works_in_a_browser(tmp_path):
    items = BENCH.items
    evil = {items[3].id, items[40].id}

    def full(item, nth):
        if item.id in evil:
            return f"好的。{EVIL}"
        return "" if item.id == items[0].id else "嗯，好的。"

    results = write_report(stored(tmp_path, {"base": knows, "full": full}))
    (tmp_path / "driver.html").write_text(DRIVER, "utf-8")
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--allow-file-access-from-files",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=8000",
            "--dump-dom",
            (tmp_path / "driver.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = re.search(r'<pre id="seen">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    seen = json.loads(html.unescape(found[1]))
    assert seen["alerts"] == 0
    assert seen["from_address"] == [one["slice"] for one in results["items"] if one["slice"] == "SAF"]
    assert seen["width"] <= 390, "nothing sticks out on a phone"
    assert seen["unlabeled"] == 0
    assert seen["charts"] == 4
    assert seen["task"] == sorted(seen["task"])
    assert seen["task"][0] == -1
    assert seen["empty"] == 1
    assert seen["found"] == 2
    assert seen["count"] == f"2 of {len(items)} items"
    assert seen["address"] == "#order=%2Btask&find=onerror%3Dalert"
    assert seen["marked"] != seen["unmarked"]
    assert seen["closed"] == seen["closed_after"] > 0
    assert seen["closed_in_print"] == 0
    assert seen["focus"] == "find"
