"""Text from files and scripts, whatever characters it holds."""

from __future__ import annotations

# What a terminal would obey instead of showing: C0, DEL, C1, marks that turn the direction
# of text, and halves of characters that cannot be encoded.
_SHOWN: dict[int, str] = {c: chr(0x2400 + c) for c in range(32) if chr(c) not in "\n\t"}
_SHOWN |= {0x7F: "\u2421"} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")
_SHOWN |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F), "\ufffd")
_SHOWN |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")


def shown(text: str) -> str:
    """Text with control characters made visible."""
    return text.translate(_SHOWN)
