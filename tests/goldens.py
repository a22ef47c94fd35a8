"""What is kept word for word; ``MPDIAG_WRITE_GOLDENS=1`` writes it anew: read the difference then."""

import os


def assert_as_kept(path, text: str) -> None:
    """A text is that of a file, apart from spaces at the ends of lines."""
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    if os.environ.get("MPDIAG_WRITE_GOLDENS"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
