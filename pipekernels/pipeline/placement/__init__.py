"""Device maps: the modules of any model placed on devices by name, and its forward run micro-batch
by micro-batch. Public doors: ``pipekernels.parallelize_pipeline`` and its companions."""
