"""Formats that traces are written in, of any content: JSON, CSV, SQLite, Protocol Buffers."""
