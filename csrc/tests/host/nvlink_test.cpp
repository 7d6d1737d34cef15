// NVLink between GPUs, as a fake of the driver's management library tells it.

#include <dlfcn.h>

#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "check.h"

namespace {

// Handles are names; the pairs of them that NVLink joins.
std::set<std::pair<std::string, std::string>> joined;
std::set<std::string> names;

int initialize() { return 0; }
int handle_of(const char* uuid, void** device) {
  *device = const_cast<char*>(names.insert(uuid).first->c_str());
  return 0;
}
int status_of(void* a, void* b, int capability, int* status) {
  CHECK(capability == 2);
  const auto name = [](void* handle) { return std::string(static_cast<char*>(handle)); };
  *status = joined.count({name(a), name(b)}) == 1 ? 0 : 5;
  return 0;
}

void* open_library(const char* name, int) {
  CHECK(std::strcmp(name, "libnvidia-ml.so.1") == 0);
  return &names;
}
void* find_symbol(void*, const char* name) {
  static const std::map<std::string, void*> functions{
      {"nvmlInit_v2", reinterpret_cast<void*>(&initialize)},
      {"nvmlDeviceGetHandleByUUID", reinterpret_cast<void*>(&handle_of)},
      {"nvmlDeviceGetP2PStatus", reinterpret_cast<void*>(&status_of)}};
  return functions.at(name);
}

}  // namespace

#define dlopen open_library
#define dlsym find_symbol
#include "host/nvlink.cu"

int main() {
  cudaUUID_t a{}, b{};
  for (int i = 0; i < 16; ++i) a.bytes[i] = static_cast<char>(16 * i + 15 - i);
  CHECK(!pipekernels::has_nvlink(a, b));
  CHECK(names.count("GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0") == 1);
  CHECK(names.count("GPU-00000000-0000-0000-0000-000000000000") == 1);
  joined.insert({*names.rbegin(), *names.begin()});
  CHECK(pipekernels::has_nvlink(a, b));
  CHECK(!pipekernels::has_nvlink(b, a));
  CHECK(!pipekernels::has_nvlink(0, 1));  // Of the fake runtime, which has one name for all.
}
