"""Reports as files: HTML pages that open offline, and Markdown."""
