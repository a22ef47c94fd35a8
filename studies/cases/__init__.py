"""Small trainings whose truth is known by training them.

``case.py`` says what a case is; the folders of ``collection.HALVES`` hold them, a family to a file,
each with a tuple ``CASES`` (they say ``from cases.case import Case, Training``). ``truth.py`` trains
them, ``score.py`` holds what an analysis foretells against that. Rules may be set by all halves but
``unseen_2/``, ``unseen_3/`` and ``unseen_4/``; ``opened/`` and ``opened_2/`` were unseen until they were
scored.
"""
