"""One process per stage: a pipeline along a dimension of a ``DeviceMesh``, and stages for the
schedules of ``torch.distributed.pipelining``. Public doors: ``execute_pipeline`` and
``Pipe.to_torch_stage``."""
