"""Names and numbers as people read them; text from a run is never interpreted as markup."""

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence

MODEL = "(the model)"
# What a terminal would obey instead of showing: C0, DEL, C1, marks that turn the direction
# of text, and halves of characters that cannot be encoded.
_SHOWN: dict[int, str] = {c: chr(0x2400 + c) for c in range(32) if chr(c) not in "\n\t"}
_SHOWN |= {0x7F: "\u2421"} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")
_SHOWN |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F), "\ufffd")
_SHOWN |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+\-.!|>~$:<&])")

KIND_NAMES: Mapping[str, str] = {
    "activation_grad": "activation gradients",
    "weight_grad": "weight gradients",
    "activation": "activations",
    "weight": "weights",
    "update": "updates",
}


def counted(number: int, one: str, several: str = "") -> str:
    """So many of something: ``1 layer``, ``2 layers``.

    Args:
        number: How many.
        one: What one is called.
        several: What several are called; by default with an s at the end.
    """
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def enumerated(words: Sequence[str], last: str = "and") -> str:
    """Words in a row: ``a``, ``a and b``, ``a, b and c``."""
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def some_of(names: Sequence[str], shown: int = 3) -> str:
    """The first of some layers or parameters, and how many more there are."""
    listed = ", ".join(layer_name(name) for name in names[:shown])
    return listed + (f" and {len(names) - shown} more" if len(names) > shown else "")


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """A hint at the name that a mistyped word is nearest to, in brackets; "" if it is near none."""
    from difflib import get_close_matches  # the command line imports this module at its start

    by_lower = {name.lower(): name for name in names}
    near = get_close_matches(word.lower(), by_lower, 1)
    return f" (did you mean {by_lower[near[0]]}?)" if near else ""


def layer_name(name: str | None) -> str:
    """A module's or parameter's name; the model itself is the empty one."""
    return name or MODEL


_NAMED_LAYERS = 2


def spoken_layer(name: str | None) -> str:
    """A module's or parameter's name within a sentence, where a bare number would be misread."""
    if not name:
        return "the model"
    return f"layer {name}" if name.isdecimal() else name


def spoken_layers(names: Sequence[str]) -> str:
    """Some layers in a phrase: all of two, else the first and how many more."""
    if len(names) <= _NAMED_LAYERS:
        return " and ".join(map(spoken_layer, names))
    return f"{spoken_layer(names[0])} and {counted(len(names) - 1, 'other layer')}"


def spoken_parameters(names: Sequence[str]) -> str:
    """Some parameters in a phrase: one by its name, else how many and the first."""
    if len(names) == 1:
        return names[0]
    return f"{counted(len(names), 'parameter')} ({names[0]} and others)"


def percent(fraction: float, digits: int = 2) -> str:
    """A share between 0 and 1 in percent; a dash for NaN, which is not known.

    Args:
        fraction: The share.
        digits: After the point. Little is not written as nothing, nor nearly all as all.
    """
    if math.isnan(fraction):
        return "–"
    if fraction == 0:
        return "0 %"
    if abs(fraction - 1) < 1e-9:
        return "100 %"
    step = 10.0**-digits  # in percent
    if 100 - step / 2 <= 100 * fraction < 100:
        return f"> {100 - step:.{digits}f} %"
    return f"{100 * fraction:.{digits}f} %" if 100 * fraction >= step else f"< {step:.{digits}f} %"


def scale_text(scale: float | None) -> str:
    """A loss scale with all its digits, as a power of two where these are many; None is no limit.

    Thousands are apart from 10,000 on.
    """
    if scale is None:
        return "no limit"
    mantissa, exponent = math.frexp(scale)
    if mantissa == 0.5 and not -12 <= exponent - 1 < 20:
        return f"2^{exponent - 1}"
    return f"{scale:,.12g}" if scale >= 10_000 else f"{scale:.9g}"


def power(exponent: int) -> str:
    """A power of two with its value: ``64 = 2⁶``."""
    value = 2.0**exponent
    number = f"{value:g}" if -4 <= exponent <= 19 else f"{value:.3g}"
    return f"{number} = 2{superscript(exponent)}"


def superscript(number: int) -> str:
    """An integer in raised digits."""
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def magnitude(value: float) -> str:
    """A positive value as a power of two with one decimal."""
    return f"2^{math.log2(value):.1f}" if value > 0 and math.isfinite(value) else "–"


def shortened(name: str, width: int = 30) -> str:
    """A name that fits beside an axis: its beginning is cut, its end says more."""
    name = layer_name(name)
    return name if len(name) <= width else "…" + name[-(width - 1) :]


def beginning(text: str, width: int) -> str:
    """A text that fits: its end is cut, its beginning says most."""
    return text if len(text) <= width else text[: width - 1] + "…"


def in_figure(name: str, width: int | None = None) -> str:
    """A name for plotly, escaped since plotly reads HTML tags."""
    return html.escape(layer_name(name) if width is None else shortened(name, width), quote=False)


def sentence(text: str) -> str:
    """A reason as a sentence, with a capital and a full stop."""
    text = text.strip()
    first = text.partition(" ")[0]
    code = any(mark in first.rstrip(".,;:") for mark in "._(")  # model.to(…) begins no capital
    head = text[:1] if code else text[:1].upper()
    return head + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def in_markdown(text: str) -> str:
    """Text with all that Markdown would interpret escaped."""
    return _MARKDOWN.sub(r"\\\1", text.replace("\n", " ").replace("\r", " "))


def duration(seconds: float) -> str:
    """A time span in the largest unit that fits."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def kernel_label(name: str) -> str:
    """A kernel's name without return type, namespaces and arguments."""
    plain = " ".join(name.split()).removeprefix("void ")
    inner = re.match(r"cutlass::(?:device_)?[Kk]ernel\d?<([^<>]+?)(?:::\w+)?>", plain)
    if inner:
        return inner.group(1)
    for noise in ("at::native::", "(anonymous namespace)::", "at::", "std::"):
        plain = plain.replace(noise, "")
    return plain.split("(")[0] or plain


def shown(text: str) -> str:
    """Text with control characters made visible."""
    return text.translate(_SHOWN)
