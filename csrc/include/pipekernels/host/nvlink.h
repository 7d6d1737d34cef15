// Links between CUDA devices.
#pragma once

namespace pipekernels {

// Whether two devices that this process can use are joined by NVLink, also through switches. False
// if the driver's management library cannot be asked.
bool has_nvlink(int a, int b);

}  // namespace pipekernels
