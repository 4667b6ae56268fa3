"""The only layer that imports mlx and mlx_lm."""
