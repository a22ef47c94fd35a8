"""How anything reaches a disk: paths and URLs, atomic writes, JSON, Parquet."""
