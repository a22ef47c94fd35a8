"""Readers of traces: each turns a file into the records of ``tensorcores.events``."""
