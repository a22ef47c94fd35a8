"""The sections of ``benchmarks/gpu.py``, and what runs them.

``promises`` is the table of what is promised, ``parts`` the list of child processes, ``runner`` starts
them, ``child`` is what runs inside one, ``document`` keeps the results and ``markdown`` shows them.
The other modules are the sections themselves; each imports torch inside its child alone.
"""
