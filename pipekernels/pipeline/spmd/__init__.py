"""One process per stage: a pipeline along a dimension of a ``DeviceMesh`` (``execute_pipeline``),
and stages for schedules of ``torch.distributed.pipelining`` (``Pipe.to_torch_stage``)."""
