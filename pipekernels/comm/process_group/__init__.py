"""What the backend of ``torch.distributed`` is made of."""
