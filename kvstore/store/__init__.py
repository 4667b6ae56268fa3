"""The store of bytes, manifests and receipts; it needs no mlx."""
