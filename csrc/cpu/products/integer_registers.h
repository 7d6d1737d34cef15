// Products of many rows in matrix registers (AMX).
//
// A register holds 16 rows of 64 bytes. A tile of columns lies in memory as a register takes it,
// two steps at a time: 16 quads of 16 columns. An instruction multiplies it by 64 elements of 16
// rows, or by 32, from half a register, where blocks have 32. The sums of a block are int32 and
// leave their register through memory, to be scaled and added to totals in float32. That takes as
// long as the products of a block of 128: four blocks are converted while the next four are
// multiplied.
//
//    16 rows of x     int8, as they lie                             register 5
//    16 columns       int8, widened before, for kChunk elements     register 4
//    sums of blocks   int32                                         registers 0 to 3
#pragma once

#if defined(__AMX_INT8__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "integer_product_kernels.h"
#include "integer_vectors.h"

namespace pipekernels {
namespace {

constexpr int kRowsAtOnce = kIntegerRows, kSpan = kIntegerSpan, kBlocksAtOnce = 4;
constexpr int kChunk = kBlocksAtOnce * kLongestIntegerBlock;  // Elements of the inner dimension.
constexpr int kSums = kRowsAtOnce * kTile;
constexpr int kFewestRows = 12;  // Of which a register is faster than vectors.

// What _tile_loadconfig reads.
struct alignas(64) RegisterShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  // Instructions multiply `span` elements.
  explicit RegisterShapes(int span) {
    for (int i = 0; i < 6; ++i) {
      row_bytes[i] = i < 5 ? kQuadBytes : span;
      rows[i] = i == 4 ? span / 4 : kRowsAtOnce;
    }
  }
};

// Blocks that are multiplied at once, of kRowsAtOnce rows.
struct Blocks {
  int64_t row, first;
  int count;
};

// Unpacks the columns of `blocks` to signed bytes, from which it subtracts the zeros of 4 bits.
template <int kBits>
void widen(const IntegerPiece& piece, const Blocks& blocks, int8_t* to) {
  const RoundedShape& shape = piece.shape;
  Bytes zeros = _mm512_set1_epi8(kBits == 8 ? -128 : 8);
  for (int64_t b = blocks.first; b < blocks.first + blocks.count; ++b) {
    if (kBits == 4 && piece.zeros != nullptr) {
      zeros = zeros_times(piece.zeros + b / piece.blocks_per_group * kTile, 0, 0x01010101);
    }
    const auto put = [&](Bytes quad, int q) {
      _mm512_storeu_si512(to + q * kQuadBytes, _mm512_sub_epi8(quad, zeros));
    };
    const int64_t end = least(shape.inner, (b + 1) * shape.block);
    for (int64_t j = b * shape.block; j < end; j += kStep, to += kQuads * kQuadBytes) {
      const uint8_t* const source = piece.values + j * kTile * kBits / 8;
      for (int q = 0; q < kQuads * kBits / 8; ++q) {
        const Bytes quads = load(source + q * kQuadBytes);
        if constexpr (kBits == 8) {
          put(quads, q);
        } else {
          put(low(quads), q);
          put(high(quads), q + kQuads / 2);
        }
      }
    }
  }
}

// Leaves the sums of block i, counted from the first of `blocks`, in register i.
void multiply(const IntegerPiece& piece, const Blocks& blocks, const int8_t* columns) {
  const RoundedShape& shape = piece.shape;
  const int64_t begin = blocks.first * shape.block, span = least(kSpan, shape.block);
  const int8_t* const x = piece.x.values + blocks.row * shape.bytes + begin;
// The number of a register is text: part of the instruction's name, for GCC.
#define PIPEKERNELS_MULTIPLY(i)                                            \
  if (i < blocks.count) {                                                  \
    const int64_t end = least((i + 1) * shape.block, shape.inner - begin); \
    _tile_zero(i);                                                         \
    for (int64_t j = i * shape.block; j < end; j += span) {                \
      _tile_loadd(4, columns + j * kTile, kQuadBytes);                     \
      _tile_loadd(5, x + j, shape.bytes);                                  \
      _tile_dpbssd(i, 5, 4);                                               \
    }                                                                      \
  }
  PIPEKERNELS_MULTIPLY(0)
  PIPEKERNELS_MULTIPLY(1)
  PIPEKERNELS_MULTIPLY(2)
  PIPEKERNELS_MULTIPLY(3)
#undef PIPEKERNELS_MULTIPLY
}

// Adds the sums of kCount blocks to the totals of their rows.
template <int kBits, int kCount>
void add_sums(const IntegerPiece& piece, const Blocks& blocks, const int32_t* sums, float* totals) {
  const int64_t stride = piece.shape.blocks, first = blocks.row * stride + blocks.first;
  const int64_t rows = least(kRowsAtOnce, piece.rows - blocks.row);
  const float* x_scales = piece.x.scales + first;
  const int32_t* x_sums = piece.x.sums + first;
  const bool has_zeros = kBits == 8 && piece.zeros != nullptr;
  Floats scales[kCount];
  const uint8_t* zeros[kCount];
  for (int i = 0; i < kCount; ++i) {
    const int64_t group = (blocks.first + i) / piece.blocks_per_group * kTile;
    scales[i] = load_scales(piece.scales, group, piece.scale_dtype);
    zeros[i] = has_zeros ? piece.zeros + group : nullptr;
  }
  totals += blocks.row * kTile;
  for (int64_t r = 0; r < rows; ++r, sums += kTile, totals += kTile) {
    Floats total = load_floats(totals);
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
      Integers sum = _mm512_loadu_si512(sums + i * kSums);
      if (has_zeros) sum = _mm512_add_epi32(sum, zeros_times(zeros[i], 128, -x_sums[i]));
      total = add_block(total, sum, times(scales[i], x_scales[i]));
    }
    store(totals, total);
    x_scales += stride;
    x_sums += stride;
  }
}

template <int kBits>
void add_sums(const IntegerPiece& piece, const Blocks& blocks, const int32_t* sums, float* totals) {
  if (blocks.count == kBlocksAtOnce) {
    add_sums<kBits, kBlocksAtOnce>(piece, blocks, sums, totals);
    return;
  }
  for (int i = 0; i < blocks.count; ++i) {
    add_sums<kBits, 1>(piece, {blocks.row, blocks.first + i, 1}, sums + i * kSums, totals);
  }
}

// Computes the first rows of the piece, as many as are worth it, and returns how many.
template <int kBits>
int64_t product_of_registers(const IntegerPiece& piece) {
  const int64_t more = piece.rows % kRowsAtOnce;
  const int64_t rows = more < kFewestRows ? piece.rows - more : piece.rows;
  if (rows == 0) return 0;
  const RoundedShape& shape = piece.shape;
  const RegisterShapes shapes(static_cast<int>(least(kSpan, shape.block)));
  _tile_loadconfig(&shapes);
  alignas(64) float totals[kMostIntegerRows * kTile];
  alignas(64) int32_t sums[kBlocksAtOnce * kSums];
  alignas(64) int8_t columns[kChunk * kTile];
  std::memset(totals, 0, sizeof(float) * rows * kTile);
  Blocks last{};
  const int64_t step = kChunk / shape.block, bytes = kChunk * kTile * kBits / 8;
  for (int64_t begin = 0; begin < shape.blocks; begin += step) {
    const int64_t end = least(shape.blocks, begin + step);
    const uint8_t* next = piece.values + end * shape.block * kTile * kBits / 8;
    widen<kBits>(piece, {0, begin, static_cast<int>(end - begin)}, columns);
    __asm__ volatile("" ::: "memory");  // GCC does not know what _tile_loadd reads.
    const int64_t turns = (rows + kRowsAtOnce - 1) / kRowsAtOnce *
                          ((end - begin + kBlocksAtOnce - 1) / kBlocksAtOnce);
    const int64_t share = (bytes / turns + kQuadBytes - 1) / kQuadBytes * kQuadBytes;
    for (int64_t row = 0; row < rows; row += kRowsAtOnce) {
      for (int64_t b = begin; b < end; b += kBlocksAtOnce) {
        for (int64_t i = 0; i < share; i += kQuadBytes) __builtin_prefetch(next + i, 0, 2);
        next += share;
        const Blocks blocks{row, b, static_cast<int>(least(kBlocksAtOnce, end - b))};
        multiply(piece, blocks, columns + (b - begin) * shape.block * kTile);
        add_sums<kBits>(piece, last, sums, totals);
        _tile_stored(0, sums, kQuadBytes);
        _tile_stored(1, sums + kSums, kQuadBytes);
        _tile_stored(2, sums + 2 * kSums, kQuadBytes);
        _tile_stored(3, sums + 3 * kSums, kQuadBytes);
        last = blocks;
      }
    }
  }
  add_sums<kBits>(piece, last, sums, totals);
  _tile_release();
  for (int64_t r = 0; r < rows; ++r) store_columns(piece, r, totals + r * kTile);
  return rows;
}

}  // namespace
}  // namespace pipekernels

#endif
