"""Small pictures: each value where it belongs, words beside each colour, no name is markup."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree as ET

import pytest

from mpdiag.display import svg
from mpdiag.display.colors import FATE_COLORS

EVIL = "<script>alert('x')</script>&\"'\x00\x1b\ud800"
FP16 = svg.Range("without a loss scale", -25, -14, 16)


def read(picture):
    found = ET.fromstring(picture.encode("utf-8"))
    assert not any("script" in element.tag for element in found.iter())
    words = [e.text or "" for e in found.iter() if e.tag.endswith("text")]
    return found, words


def test_a_cell_for_each_occupied_power_of_two_in_the_colour_of_its_fate():
    picture = svg.heat_maps(["a", "b"], [[0, 3, 0, 5], [1, 0, 0, 0]], -27, [FP16])
    found, words = read(picture)
    cells = {
        path.get("fill"): re.findall(r"M(\d+) (\d+)", path.get("d"))
        for path in found.iter()
        if path.tag.endswith("path") and path.get("fill")
    }
    assert cells == {
        FATE_COLORS["lost"]: [("1", "0"), ("0", "1")],
        FATE_COLORS["subnormal"]: [("3", "0")],
    }
    assert {"a", "b", "becomes 0", "loses bits", "0 ←"} <= set(words)
    assert "kept" not in words  # a colour that does not occur


def test_the_range_of_each_map_is_its_own():
    scaled = svg.Range("at a loss scale of 4", -27, -16, 14)
    found, words = read(svg.heat_maps(["a"], [[2] * 10], -30, [FP16, scaled]))
    assert words.count("0 ←") == 2
    assert [w for w in words if "scale" in w] == ["without a loss scale", "at a loss scale of 4"]
    lines = [p for p in found.iter() if p.get("stroke") == FATE_COLORS["lost"]]
    assert len(lines) == 2


def test_names_are_text():
    held = svg.Range(EVIL, -25, -14, 16)
    for picture in (
        svg.heat_maps([EVIL], [[1]], -20, [held]),
        svg.shares(EVIL, [(EVIL, 1.0, "#000000")]),
        svg.interval(0, math.inf, 6, words=EVIL),
        svg.curve([1.0, 2.0], EVIL),
        svg.differences([(EVIL, -1.0, 0.0, 1.0, 0.5)], EVIL),
    ):
        read(picture)


def test_parts_lie_side_by_side_and_say_their_share():
    found, words = read(svg.shares("time", [("a", 0.25, "#111111"), ("b", 0.75, "#222222")]))
    bars = [e for e in found.iter() if e.tag.endswith("rect") and e.get("height") == "26"]
    left, right = (float(bars[1].get("x")), float(bars[0].get("x")) + float(bars[0].get("width")))
    assert left == pytest.approx(right, abs=0.2)
    assert {"a: 25.0 %", "b: 75.0 %"} <= set(words)


def test_a_line_is_interrupted_where_a_value_is_not_finite():
    assert svg.curve([1.0, 2.0, math.nan, 3.0, 1.0], "loss").count("M") == 2
    assert svg.curve([math.nan, 1.0], "loss") == ""
    assert "nan" not in svg.curve([-1.7e308, 0.0, 1.7e308], "loss")  # further apart than a float
    assert svg.differences([], "nothing") == ""


def test_no_ground_leaves_the_page_s_own():
    assert "currentColor" in svg.curve([1.0, 2.0], "loss")
    assert "currentColor" not in svg.shares("a", [("a", 1.0, "#111111")], ground="#ffffff")
