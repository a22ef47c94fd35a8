"""Every picture of a profile: its receipt gives its numbers, and a name in it is text."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from made_profiles import profile, profile_with_use, profile_with_work
from receipt_checks import same_numbers

from mpdiag.tensorcores.views import tensor_cores

MADE = {"plain": profile, "with work": profile_with_work, "with use": profile_with_use}
KEYS = {
    "plain": ["verdicts", "causes", "kernels", "roofline"],
    "with work": ["verdicts", "causes", "kernels", "roofline"],
    "with use": ["verdicts", "causes", "use", "steps", "kernels", "roofline"],
    "digits": ["verdicts", "causes", "kernels", "roofline"],
    "gpu-sample": ["verdicts", "causes", "use", "steps", "kernels", "roofline"],
}


@pytest.mark.parametrize("name", KEYS)
def test_every_receipt_gives_the_numbers_and_names_are_text(root, tmp_path, name):
    folder = root / "sample_runs" / name
    if name in MADE:
        folder = tmp_path
        (folder / "profile.json").write_text(json.dumps(MADE[name]()))
    document = json.loads((folder / "profile.json").read_text())
    pictures = list(tensor_cores.pictures(str(folder), document))
    assert [picture.key for picture in pictures] == KEYS[name]
    for picture in pictures:
        if picture.frame.empty:
            assert picture.figure.layout.annotations  # a sentence
            continue
        shown = picture.figure.to_json().replace("\\u003c", "<")
        assert not any(tag in shown for tag in ("<i>", "<b>gemm", "<b>simt", "<b>TF32"))
        if picture.key == "verdicts":  # which has a row for each that is absent, too
            frame = picture.frame[picture.frame["time_us"] > 0]
            picture = replace(picture, frame=frame.sort_values("verdict", ignore_index=True))
        same_numbers(picture)
