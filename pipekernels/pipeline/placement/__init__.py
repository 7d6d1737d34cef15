"""Device maps (``pipekernels.parallelize_pipeline``): places the modules of any model on devices by
name, and runs its forward microbatch by microbatch."""
