"""The pages and pictures of a profile."""
