"""The parts of ``studies/real_scripts.py``."""
