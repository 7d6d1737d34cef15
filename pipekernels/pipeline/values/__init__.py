"""Values passed between layers: nested containers of tensors, cut into microbatches and joined.

Does not depend on stages or pipes; all other packages of the pipeline may import this one.
"""
