// The kernels of integer_product.h, written once over vectors of kVectorBytes and compiled once per
// instruction set. As in skinny_gemm_kernels.cpp, everything else has internal linkage.
#include "integer_product_kernels.h"

#include <cstdint>
#include <cstring>
#include <limits>

#include "integer_registers.h"
#include "integer_vectors.h"

namespace pipekernels {
namespace {

// ---- rows ---------------------------------------------------------------------------------------

// To nearest even: the rounding mode of a process that has not changed it.
void round_step(const float* x, float factor, int8_t* to) {
#if defined(__x86_64__)
  for (int i = 0; i < kStep; i += 16) {
    __m128i parts[4];
    for (int p = 0; p < 4; ++p) {
      const __m128 scaled = _mm_mul_ps(_mm_loadu_ps(x + i + 4 * p), _mm_set1_ps(factor));
      parts[p] = _mm_cvtps_epi32(scaled);
    }
    const __m128i halves[2] = {_mm_packs_epi32(parts[0], parts[1]),
                               _mm_packs_epi32(parts[2], parts[3])};
    const __m128i packed = _mm_packs_epi16(halves[0], halves[1]);
    std::memcpy(to + i, &packed, sizeof(packed));
  }
#else
  for (int i = 0; i < kStep; ++i) {
    to[i] = static_cast<int8_t>(__builtin_lrintf(x[i] * factor));
  }
#endif
}

// A block of `count` elements, a multiple of kStep.
void round_block(const float* x, int64_t count, int8_t* values, float* scale, int32_t* sum) {
  constexpr uint32_t kInfinity = 0x7f800000, kSmallest = (127u - 100) << 23;
  uint32_t largest = 0;  // Of magnitudes, whose bits are ordered as they are.
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = reinterpreted<uint32_t>(x[i]) & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  if (largest >= kInfinity || largest < kSmallest) {
    for (int64_t i = 0; i < count; i += kStep) std::memset(values + i, 0, kStep);
    *scale = largest < kSmallest ? 0 : std::numeric_limits<float>::quiet_NaN();
    *sum = 0;
    return;
  }
  const float most = reinterpreted<float>(largest);
  *scale = most / 127;
  for (int64_t i = 0; i < count; i += kStep) round_step(x + i, 127 / most, values + i);
  int32_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += values[i];
  *sum = total;
}

void round(const RoundedShape& shape, const RoundedRows& to, const void* x, DType dtype) {
  for (int64_t b = 0, j = 0; b < shape.blocks; ++b, j += shape.block) {
    const int64_t count = least(shape.block, shape.inner - j);
    const int64_t filled = (count + kStep - 1) / kStep * kStep;
    float block[kLongestIntegerBlock];
    std::memset(block + filled - kStep, 0, kStep * sizeof(float));
    if (dtype == DType::kFloat32) {
      std::memcpy(block, static_cast<const float*>(x) + j, count * sizeof(float));
    } else {
      const auto* const words = static_cast<const uint16_t*>(x) + j;
      for (int64_t i = 0; i < count; ++i) block[i] = from_bfloat16(words[i]);
    }
    round_block(block, filled, to.values + j, to.scales + b, to.sums + b);
  }
  const int64_t filled = (shape.inner + kStep - 1) / kStep * kStep;
  std::memset(to.values + filled, 0, shape.bytes - filled);
}

// ---- products -----------------------------------------------------------------------------------

// Rows first to first + kRows - 1. The loops are unrolled, so that all sums stay in registers.
template <int kBits, int kRows>
void product_of_rows(const IntegerPiece& piece, int64_t first) {
  constexpr int kStepBytes = kQuads * kQuadBytes * kBits / 8;
  constexpr int kOffset = kBits == 8 && kSignedBytes ? 128 : 0;
  constexpr int kZero = 1 << (kBits - 1);
  const RoundedShape& shape = piece.shape;
  const int64_t blocks = shape.blocks, bytes = shape.bytes;
  const int8_t* x = piece.x.values + first * bytes;
  const float* const x_scales = piece.x.scales + first * blocks;
  const int32_t* const x_sums = piece.x.sums + first * blocks;
  Floats totals[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) totals[r] = no_floats();
  Floats scales = no_floats();
  const uint8_t* weights = piece.values;
  const uint8_t* zeros = piece.zeros;
  int64_t group = 0, left = 0, inner = shape.inner;
  for (int64_t b = 0; b < blocks; ++b, --left, inner -= shape.block) {
    if (left == 0) {
      scales = load_scales(piece.scales, group * kTile, piece.scale_dtype);
      if (piece.zeros != nullptr) zeros = piece.zeros + group * kTile;
      left = piece.blocks_per_group;
      ++group;
    }
    Integers sums[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const int32_t factor = -x_sums[r * blocks + b];
      sums[r] =
          zeros == nullptr ? all((kZero - kOffset) * factor) : zeros_times(zeros, kOffset, factor);
    }
    for (int64_t j = 0; j < least(shape.block, inner); j += kStep) {
#pragma GCC unroll 8
      for (int i = 0; i < kStepBytes; i += kQuadBytes) {
        __builtin_prefetch(weights + i + piece.ahead, 0, 2);
      }
      StepProducts<kBits, kRows>::add(sums, weights, x, bytes);
      weights += kStepBytes;
      x += kStep;
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      totals[r] = add_block(totals[r], sums[r], times(scales, x_scales[r * blocks + b]));
    }
  }
  for (int r = 0; r < kRows; ++r) {
    float columns[kTile];
    store(columns, totals[r]);
    store_columns(piece, first + r, columns);
  }
}

// A row's bits do not depend on the rows that run beside it, nor on what multiplies it.
template <int kBits>
void product(const IntegerPiece& piece) {
  int64_t row = 0;
#if defined(__AMX_INT8__)
  row = product_of_registers<kBits>(piece);
#endif
  for (; row + kMostRows <= piece.rows; row += kMostRows) {
    product_of_rows<kBits, kMostRows>(piece, row);
  }
  if constexpr (kMostRows > 4) {
    for (; row + 4 <= piece.rows; row += 4) product_of_rows<kBits, 4>(piece, row);
  }
  if constexpr (kMostRows > 2) {
    for (; row + 2 <= piece.rows; row += 2) product_of_rows<kBits, 2>(piece, row);
  }
  for (; row < piece.rows; ++row) product_of_rows<kBits, 1>(piece, row);
}

constexpr IntegerKernels kKernels = {&round, &product<8>, &product<4>};

}  // namespace

const IntegerKernels& PIPEKERNELS_FOR_ISA(integer_kernels)() { return kKernels; }

}  // namespace pipekernels
