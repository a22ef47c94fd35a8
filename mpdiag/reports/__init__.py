"""Views of runs and analyses: tables, figures, text, JSON. They compute nothing of their own."""
