// Registers the kernels between processes of vLLM, whose own bindings need all of vLLM. Its headers
// expect a version from its build.
#define VLLM_VERSION "of bench/peers/vllm.cpp"

#include <torch/library.h>

#include "cpu/shm.cpp"

TORCH_LIBRARY(vllm_shm, operators) {
  operators.def("init_shm_manager", &init_shm_manager);
  operators.def("join_shm_manager", &join_shm_manager);
  operators.def("shm_allreduce", &shm_allreduce);
  operators.def("shm_all_gather", &shm_all_gather);
  operators.def("shm_send_tensor_list", &shm_send_tensor_list);
  operators.def("shm_recv_tensor_list", &shm_recv_tensor_list);
}
