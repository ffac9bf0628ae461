"""JSON as docs/plan.md explains it, pages that show what the command prints, the page as HTML."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.models.catalog import load_spec
from lockstep.plan.document import dumps
from lockstep.sync.plan import LinkModel

ROOT = Path(__file__).parents[2]
LLAMA = ["--model", "llama-3.1-8b", "--actor", "fsdp=8", "--rollout", "tensor=4,data=2"]
CROSSING = 32_124_239_872  # worked out in test_answer.py


def paths_of(value: Any, at: str = "") -> Iterator[str]:
    """Every field of a document as docs/plan.md writes it."""
    free = {"actor.axes", "rollout.axes", "unused", "unchanged", "alternatives"}
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from paths_of(inner, f"{at}.{'{}' if at in free else name}" if at else name)
    elif isinstance(value, list):
        for inner in value:
            yield from paths_of(inner, f"{at}[]")
    else:
        yield at


def test_every_field_is_documented_and_every_documented_field_is_there(tiny, llama) -> None:
    table = (ROOT / "docs" / "plan.md").read_text().partition("## JSON")[2]
    documented = {
        name
        for line in table.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])
    }
    answers = [
        llama,
        lockstep.plan_sync(tiny, actor="fsdp=2", rollout="tensor=2", lora=2, link=LinkModel(bisection_gbps=1)),
        lockstep.plan_sync(tiny, actor="fsdp=2", rollout="tensor=2", format="fused"),
    ]
    found = {path for answer in answers for path in paths_of(json.loads(dumps(answer)))}
    # These stay empty until a format leaves something out.
    assert found <= documented and documented - found == {"unused.{}", "unchanged.{}"}


def test_json_agrees_with_itself(llama) -> None:
    found = json.loads(dumps(llama), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert found["parameters"] == 8_030_261_248 and found["certificate"]["ok"] is True
    for total in ("bytes_written", "bytes_crossing", "bytes_local", "bytes_filled"):
        assert found[total] == sum(leaf[total] for leaf in found["leaves"])
    assert (
        found["bytes_crossing"]
        == sum(d["sent"] for d in found["devices"])
        == sum(d["received"] for d in found["devices"])
    )
    assert found["bound_seconds"] == max(found["bounds"][f"{name}_s"] for name in ("receive", "send", "bisection"))
    assert found["peak_staging_bytes"] <= found["staging_bytes"] and found["plan_hash"] == llama.plan.hash
    assert set(found["alternatives"]) == {"colocated", "lora", "naive"}
    assert found["leaves"][0]["actor_cuts"] == [{"parts": 1, "axes": []}, {"parts": 8, "axes": ["fsdp"]}]


def blocks(page: str) -> list[str]:
    """What the pages show of the command on Llama."""
    text = (ROOT / page).read_text()
    return re.findall(r"```\n\$ lockstep plan " + re.escape(" ".join(LLAMA)) + r"\n(.*?)```", text, re.DOTALL)


def test_the_documented_output_is_real(llama) -> None:
    (shown,) = blocks("docs/plan.md")
    assert shown == llama.summary + "\n"
    (part,) = blocks("README.md")
    lines = llama.summary.splitlines()
    assert all(line in lines for line in part.splitlines() if line not in ("", "..."))


class Page(HTMLParser):
    """Tags that are open, ids, links, what the scripts hold; fails on a tag that closes what is not open."""

    VOID = frozenset({"meta", "input", "br", "path", "rect", "line"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.hrefs: list[str] = []
        self.scripts: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            assert name not in ("src", "onclick", "onload"), f"{tag} {name}"
            self.ids += [value or ""] if name == "id" else []
            self.hrefs += [value or ""] if name == "href" else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)


def drawn(page: Page) -> dict[str, Any]:
    """The values that the page's script draws from."""
    return json.loads(next(text for text in page.scripts if text.startswith("{")))


def test_the_page_is_well_formed_and_loads_nothing(llama) -> None:
    html = llama.to_html()
    page = Page(html)
    assert page.open == [] and len(set(page.ids)) == len(page.ids)
    assert all(href.startswith("#") and href[1:] in page.ids for href in page.hrefs)
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "url(" not in html and "@import" not in html and len(html) < 200_000
    assert "default-src 'none'" in html and "prefers-color-scheme" in html
    for text in ("29.92 GiB", "certificate ok", "layers.*.gate", 'data-device="15"', 'aria-label="Bytes from sender'):
        assert text in html


def test_the_page_draws_the_plan(llama) -> None:
    data = drawn(Page(llama.to_html()))
    assert sum(map(sum, data["heat"]["bytes"])) == CROSSING and data["actor"] == [*range(8)]
    gate = next(leaf for leaf in data["leaves"] if leaf["name"] == "layers.*.gate x32")
    # 8 source shards feed each of 4 target shards, which 2 devices hold: (4096 / 8) x (14336 / 4) elements, twice.
    assert [feed[:3] for feed in gate["feeds"]] == [[t, 0, s] for t in range(4) for s in range(8)]
    assert {feed[3] for feed in gate["feeds"]} == {2 * 2 * 512 * 3584} and {feed[8] for feed in gate["feeds"]} == {2}
    assert [feed[6] for feed in gate["feeds"][:8]] == [[s] for s in range(8)]
    assert gate["feeds"][9][10:] == [[[512, 1024], [3584, 7168]]] * 2
    layout = data["layouts"][gate["target"]]
    assert layout["cells"] == [0, 1, 2, 3] * 2 and layout["devices"] == [*range(8, 16)]
    assert layout["edges"] == [[0, 4096], [0, 3584, 7168, 10752, 14336]]


def test_feeds_are_the_transfers(tiny) -> None:
    """Of every leaf, casts, relays and fused leaves included."""
    for more in ({}, {"format": "fused"}, {"rollout": "data=3,tensor=2@1-6", "actor_dtype": "float32"}):
        asked = {"actor": "fsdp=2", "rollout": "tensor=4"} | more
        answer = lockstep.plan_sync(tiny, **asked)
        for leaf in drawn(Page(answer.to_html()))["leaves"]:
            listed = list(answer.plan.transfers(leaf["path"]))
            crossing = sum(t.bytes * len(t.receivers) for t in listed if t.receivers != (t.sender,))
            local = sum(t.bytes for t in listed if t.receivers == (t.sender,))
            assert sum(feed[3] for feed in leaf["feeds"]) == crossing == leaf["crossing"]
            assert sum(feed[4] for feed in leaf["feeds"]) == local
            assert {s for feed in leaf["feeds"] for s in feed[6]} == {
                t.sender for t in listed if t.receivers != (t.sender,)
            }


def test_a_page_of_many_devices_stays_small() -> None:
    spec = load_spec("llama-3.1-8b")
    spec = replace(spec, layers=spec.layers[:2])
    answer = lockstep.plan_sync(spec, actor="fsdp=256", rollout="tensor=32,data=4")
    html = answer.to_html()
    data = drawn(Page(html))
    assert len(html) < 1_000_000 and len(data["heat"]["bytes"]) == 64 and data["heat"]["rows"][1] == "4-7"
    gate = next(leaf for leaf in data["leaves"] if leaf["name"] == "layers.*.gate x2")
    assert gate["feeds"] == [] and len(gate["totals"]) == 32
    assert sum(total[1] for total in gate["totals"]) == gate["crossing"] and gate["totals"][0][3] == 256


def test_text_from_outside_is_inert(tiny, tmp_path) -> None:
    folder = tmp_path / "x<script>alert(1)<"
    shutil.copytree(tiny, folder)
    html = lockstep.plan_sync(folder, actor="fsdp=2", rollout="tensor=2").to_html()
    assert "<script>alert" not in html and Page(html).open == []
