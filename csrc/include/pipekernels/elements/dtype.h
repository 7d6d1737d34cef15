// The codes of element types, reductions and all-reduce algorithms that Python passes. Python reads
// their names from the extension (pipekernels/comm/codes.py), in the order of their codes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pipekernels/host/host_device.h"

namespace pipekernels {

// The first kFloatingDTypes can be cast to one another, the first kReducibleDTypes can be reduced
// on all devices, and all can be copied. reduce.h says what can be reduced on CPUs.
enum class DType : uint8_t {
  kFloat64,
  kFloat32,
  kFloat16,
  kBFloat16,
  kInt32,
  kInt64,
  kInt16,
  kInt8,
  kUInt8,
  kBool,
  kComplex64,
  kComplex128,
  kComplex32,
  kUInt16,
  kUInt32,
  kUInt64,
  kFloat8E4M3Fn,
  kFloat8E4M3FnUz,
  kFloat8E5M2,
  kFloat8E5M2FnUz,
  kFloat8E8M0FnU,
  kFloat4E2M1FnX2,
};
constexpr int kDTypes = static_cast<int>(DType::kFloat4E2M1FnX2) + 1;
constexpr int kFloatingDTypes = 4;
constexpr int kReducibleDTypes = 6;

// kTreeSum and kTreeAvg are in tree order; see tree_order.h. Those from kProduct on are for CPUs;
// kScaledSum is a sum of terms that each rank has scaled before.
enum class Reduction : uint8_t {
  kSum,
  kAvg,
  kMax,
  kMin,
  kTreeSum,
  kTreeAvg,
  kProduct,
  kAnd,
  kOr,
  kXor,
  kScaledSum,
};
constexpr int kReductions = 11;
constexpr int kDeviceReductions = 6;  // The first ones.
// The first ones, which callers name on all devices, each in one of the orders.
constexpr int kOperations = 4;

enum class Order : uint8_t { kRank, kTree };
constexpr int kOrders = 2;

enum class Algorithm : uint8_t { kAuto, kOneShot, kTwoShot, kRing };
constexpr int kAlgorithms = 4;

constexpr size_t size_of(DType dtype) {
  constexpr size_t sizes[] = {8, 4, 2, 2, 4, 8, 2, 1, 1, 1, 8, 16, 4, 2, 4, 8, 1, 1, 1, 1, 1, 1};
  return sizes[static_cast<int>(dtype)];
}

constexpr const char* name_of(DType dtype) {
  constexpr const char* names[] = {"float64",        "float32",
                                   "float16",        "bfloat16",
                                   "int32",          "int64",
                                   "int16",          "int8",
                                   "uint8",          "bool",
                                   "complex64",      "complex128",
                                   "complex32",      "uint16",
                                   "uint32",         "uint64",
                                   "float8_e4m3fn",  "float8_e4m3fnuz",
                                   "float8_e5m2",    "float8_e5m2fnuz",
                                   "float8_e8m0fnu", "float4_e2m1fn_x2"};
  return names[static_cast<int>(dtype)];
}

constexpr const char* name_of(Reduction reduction) {
  constexpr const char* names[] = {
      "sum",     "avg", "max", "min", "sum in tree order", "avg in tree order",
      "product", "and", "or",  "xor", "premul_sum"};
  return names[static_cast<int>(reduction)];
}

constexpr const char* name_of(Order order) { return order == Order::kTree ? "tree" : "rank"; }

constexpr const char* name_of(Algorithm algorithm) {
  constexpr const char* names[] = {"auto", "one_shot", "two_shot", "ring"};
  return names[static_cast<int>(algorithm)];
}

constexpr bool is_floating(DType dtype) { return static_cast<int>(dtype) < kFloatingDTypes; }
constexpr bool is_reducible(DType dtype) { return static_cast<int>(dtype) < kReducibleDTypes; }
constexpr bool is_integer(DType dtype) { return dtype == DType::kInt32 || dtype == DType::kInt64; }

PK_HOST_DEVICE constexpr bool is_extremum(Reduction reduction) {
  return reduction == Reduction::kMax || reduction == Reduction::kMin;
}
PK_HOST_DEVICE constexpr bool is_average(Reduction reduction) {
  return reduction == Reduction::kAvg || reduction == Reduction::kTreeAvg;
}

// Whether terms are combined in tree order. Sums of integers are the same in all orders.
PK_HOST_DEVICE constexpr bool is_tree(Reduction reduction) {
  return reduction == Reduction::kTreeSum || reduction == Reduction::kTreeAvg;
}

// The reduction for an operation and an order; a maximum or minimum is the same in all orders.
constexpr Reduction in_order(Reduction operation, Order order) {
  if (order == Order::kRank || is_extremum(operation)) return operation;
  return is_average(operation) ? Reduction::kTreeAvg : Reduction::kTreeSum;
}

// Size of an element of a partial result: 16-bit floats are summed in float32.
constexpr size_t partial_size_of(DType dtype) {
  const bool is_half =
      dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kComplex32;
  return is_half ? 2 * size_of(dtype) : size_of(dtype);
}

}  // namespace pipekernels
