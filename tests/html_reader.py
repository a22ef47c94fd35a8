"""Reads a page as a browser does: its elements, its scripts, and the text outside of them."""

from html.parser import HTMLParser

EMPTY = {"meta", "link", "input", "br", "img", "hr", "base", "col"}


class Page(HTMLParser):
    """The elements of a page; each that is opened must be closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements, self.text, self.scripts, self.stack = [], "", [], []
        self.feed(html)
        assert self.stack == []

    @property
    def tags(self):
        return {tag for tag, _ in self.elements}

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in EMPTY:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        if tag not in EMPTY:
            assert self.stack.pop() == tag

    def handle_data(self, data):
        inside = self.stack[-1] if self.stack else ""
        if inside == "script":
            self.scripts.append(data)
        elif inside != "style":
            self.text += f"{data} "
