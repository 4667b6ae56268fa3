"""kvstore: a content-addressed store and an open file format for KV caches."""

__version__ = "0.1.0"
