"""Operations that call no communicator: splitting and joining microbatches, copies between
devices, the sharded GEMM; and helpers of registered operations. :mod:`pipekernels.ops` exports
them."""
