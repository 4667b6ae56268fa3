"""The format: bytes in, frozen objects out. No files, clock, database or mlx."""
