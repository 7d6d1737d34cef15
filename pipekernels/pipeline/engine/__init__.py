"""One mini-batch, from the call of a pipe to its last gradient. Called by ``Pipe``.

Each file uses files below it::

    engine           what a pipe keeps from one mini-batch to the next; its node in autograd's graph
    losses           the loss of each microbatch, in a training step
    mini_batch_run   one mini-batch: a method per action, forwards and backwards
    stages           what is known of the layers
    task             one stage on one microbatch: forward, recomputation, backward
    split_backward   a backward in two parts, of inputs and of parameters
    parameters       the parameter copies that gradients accumulate into
    transport        copies and skips from stage to stage
    entry            where the graph of a stage begins
"""
