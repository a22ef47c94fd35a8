"""The version, in a module that imports nothing: the build, the command and the records read it."""

__version__ = "0.1.0"
