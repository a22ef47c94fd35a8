"""Colours that colour-blind people can tell apart, on light and on dark ground alike.

After Okabe and Ito, *Color Universal Design* (2008), the blue a little lighter for dark pages. A
colour never says anything alone: legends, positions and words repeat it.
"""

BLUE = "#2b83c6"
ORANGE = "#e69f00"
VERMILION = "#d55e00"
SKY = "#56b4e9"
GREEN = "#009e73"
PURPLE = "#cc79a7"
YELLOW = "#d8c81f"
GREY = "#8b93a1"

SERIES = (BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY, YELLOW, GREY)

FATE_COLORS = {"zero": GREY, "lost": VERMILION, "rounded": ORANGE, "kept": BLUE, "overflow": PURPLE}
"""What a format makes of a value: it was 0, becomes 0, is rounded with and without harm, becomes ∞."""
PALE = {"kept": 0.55}
"""Opacity of what is harmless; all else is opaque."""

VERDICT_COLORS = {
    "tensor_core": GREEN,
    "cuda_core": VERMILION,
    "helper": SKY,
    "layout": ORANGE,
    "other": GREY,
    "unknown": PURPLE,
}


def rgba(colour: str, opacity: float) -> str:
    """A colour ``#rrggbb`` as CSS writes it with an opacity from 0 to 1."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {opacity:g})"
