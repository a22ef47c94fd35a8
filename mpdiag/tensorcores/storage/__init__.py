"""A trace in memory of one size: its records packed away on disk until they are needed."""
