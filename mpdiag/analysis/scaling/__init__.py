"""The loss scale: the admissible interval, the method, its replay over a recording."""
