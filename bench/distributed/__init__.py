"""Training and calls through torch.distributed."""
