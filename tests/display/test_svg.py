"""Small pictures: each value where it belongs, words beside each colour, no name is markup."""

import math
from pathlib import Path
from xml.etree import ElementTree as ET

from goldens import assert_as_kept

from mpdiag.analysis.scaling.necessity import MATTERS
from mpdiag.display import svg

EVIL = "<script>alert('x')</script>&\"'\x00\x1b\ud800"
FP16 = svg.Range("without a loss scale", -25, -14, 16)


def read(picture):
    """As a browser does: it is whole, and holds no script."""
    found = ET.fromstring(picture.encode("utf-8"))
    assert not any("script" in element.tag for element in found.iter())


def test_pictures_are_kept():
    """Two layers, two ranges, shares, a part of a curve, differences, and a ground of its own."""
    scaled = svg.Range("at a loss scale of 4", -27, -16, 14)
    drawn = [
        svg.heat_maps(["a", "b"], [[0, 3, 0, 5], [1, 0, 0, 0]], -27, [FP16]),
        svg.heat_maps(["a"], [[2] * 10], -30, [FP16, scaled]),
        svg.shares("time", [("a", 0.25, "#111111"), ("b", 0.75, "#222222")]),
        svg.shares("a", [("a", 1.0, "#111111")], ground="#ffffff"),
        svg.interval(-0.5, 2.0, 6, words="an interval"),
        svg.curve([1.0, 2.0, math.nan, 3.0, 1.0], "loss"),
        svg.differences([("accuracy", -1.0, 0.0, 1.0, 0.5)], "differences"),
    ]
    for picture in drawn:
        read(picture)
    assert_as_kept(Path(__file__).with_name("pictures.txt"), "\n".join(map(str, drawn)))


def test_harm_is_what_the_analysis_calls_lost_beyond_what_can_be_spared():
    assert svg.HARMFUL == MATTERS


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


def test_nothing_to_draw_is_no_picture():
    assert svg.curve([math.nan, 1.0], "loss") == ""
    assert "nan" not in svg.curve([-1.7e308, 0.0, 1.7e308], "loss")  # further apart than a float
    assert svg.differences([], "nothing") == ""
