"""The conformance kit: a reference reader and writer over files, and a runner for anybody's.

It rests on ``kvstore.format`` alone: no store, no database, no MLX. ``reader``,
``recipe``, ``canon`` and ``chain`` are what an implementation does; ``plugin`` offers ours
through the same contract as any other (``fixtures/README.md``); ``runner`` judges one by
the cases of ``fixtures/index.json``.
"""
