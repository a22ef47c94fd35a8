"""Sizes of a model as unknowns: which are equal, which divide which, and the cheapest that fit."""
