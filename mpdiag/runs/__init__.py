"""The run folder: reading, writing, schema, validation."""
