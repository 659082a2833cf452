"""Policy objectives, one small file each: packed log-probs and advantages -> a loss per token."""
