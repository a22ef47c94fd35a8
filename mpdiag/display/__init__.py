"""Wording and HTML that every part of the package shares."""
