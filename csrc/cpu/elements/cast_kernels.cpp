// The conversion kernels, written once over vectors of kVectorBytes and compiled once per
// instruction set. As in reduce_kernels.cpp, everything else has internal linkage and uses no
// inline function of other headers.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "pipekernels/elements/cast.h"
#include "vectors.h"

namespace pipekernels {
namespace {

constexpr size_t kLanes = kVectorBytes / sizeof(float);

// A vector of kLanes elements, whose size depends on their type.
template <class T>
struct LanesOf {
  typedef T type __attribute__((vector_size(kLanes * sizeof(T))));
};
template <class T>
using Lanes = typename LanesOf<T>::type;

// ---- element types: load and store kLanes of them as floats ------------------------------------

template <class T>
struct Converted {
  using Element = T;
  static Vector<float> load(const void* source) {
    Lanes<T> v;
    std::memcpy(&v, source, sizeof(v));
    return __builtin_convertvector(v, Vector<float>);
  }
  static void store(void* destination, Vector<float> floats) {
    const auto v = __builtin_convertvector(floats, Lanes<T>);
    std::memcpy(destination, &v, sizeof(v));
  }
};
using Float64 = Converted<double>;
using Float32 = Converted<float>;

template <class Format>
struct SixteenBits {
  using Element = uint16_t;
  static Vector<float> load(const void* source) {
    Lanes<uint16_t> v;
    std::memcpy(&v, source, sizeof(v));
    return Format::from_high(__builtin_convertvector(v, Vector<uint32_t>) << 16);
  }
  static void store(void* destination, Vector<float> floats) {
    const auto v = __builtin_convertvector(Format::to_low(floats), Lanes<uint16_t>);
    std::memcpy(destination, &v, sizeof(v));
  }
};
using BFloat16 = SixteenBits<Bf16Format>;

#if defined(__F16C__)
struct Float16 {
  using Element = uint16_t;
  static Vector<float> load(const void* source) {
    decltype(narrow_half(Vector<float>{})) v;
    std::memcpy(&v, source, sizeof(v));
    return widen_half(v);
  }
  static void store(void* destination, Vector<float> floats) {
    const auto v = narrow_half(floats);
    std::memcpy(destination, &v, sizeof(v));
  }
};
#else
using Float16 = SixteenBits<Fp16Format>;
#endif

// ---- kernels -----------------------------------------------------------------------------------

template <class From, class To>
void cast(void* destination, const void* source, size_t count) {
  using Source = typename From::Element;
  using Target = typename To::Element;
  const auto* from = static_cast<const Source*>(source);
  auto* to = static_cast<Target*>(destination);
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) To::store(to + i, From::load(from + i));
  if (i == count) return;
  Source last[kLanes] = {};
  Target converted[kLanes];
  std::memcpy(last, from + i, (count - i) * sizeof(Source));
  To::store(converted, From::load(last));
  std::memcpy(to + i, converted, (count - i) * sizeof(Target));
}

template <class From>
constexpr CastKernel kFrom[kFloatingDTypes] = {
    &cast<From, Float64>,
    &cast<From, Float32>,
    &cast<From, Float16>,
    &cast<From, BFloat16>,
};

constexpr const CastKernel* kTables[kFloatingDTypes] = {
    kFrom<Float64>,
    kFrom<Float32>,
    kFrom<Float16>,
    kFrom<BFloat16>,
};

}  // namespace

const CastKernel* const* PIPEKERNELS_FOR_ISA(cast_tables)() { return kTables; }

}  // namespace pipekernels
