// Products of rows with a large matrix of 8- or 4-bit integers, as language models have on CPUs.
//
// The rows are rounded to 8 bits first, with a scale for each block of their elements, so that
// integers are multiplied and a weight is never widened to a float: the product of a few rows takes
// as long as reading the matrix. A block is part of a group of the matrix, or a group: see
// IntegerMatrix::block(). Sums of a block are exact; blocks are added in their order, each by one
// fused multiplication and addition in float32. So every instruction set gives the same bits, for
// any number of rows and threads.
//
// The matrix lies as kernels read it, in one sequence. Its columns, the outputs, come in tiles of
// kIntegerTile and its inner dimension in steps of kIntegerStep, both filled up:
//
//    8 bits    [tile][step][8 quads][16 columns][4]
//    4 bits    [tile][step][4 pairs of quads][16 columns][4], quad j low and quad j + 4 high
//
// where a quad are 4 elements that follow each other in the inner dimension.
#pragma once

#include <cstdint>

#include "pipekernels/elements/dtype.h"

namespace pipekernels {

constexpr int64_t kIntegerStep = 32, kIntegerTile = 16, kLongestIntegerBlock = 128;

// The instruction sets that integer products are compiled for. kAvxVnni and kAvx512Vnni multiply
// and add four bytes in one instruction; kAmx is kAvx512Vnni with matrix registers for many rows.
enum class IntegerIsa { kPortable, kAvx2, kAvxVnni, kAvx512Vnni, kAmx };

constexpr IntegerIsa kIntegerIsas[] = {IntegerIsa::kPortable, IntegerIsa::kAvx2,
                                       IntegerIsa::kAvxVnni, IntegerIsa::kAvx512Vnni,
                                       IntegerIsa::kAmx};

// Asks the kernel for the matrix registers if it is the first call for them.
bool integer_isa_available(IntegerIsa isa);

// The fastest one that this machine supports.
IntegerIsa best_integer_isa();

// A matrix of (value - zero) * scale, where `value` is unsigned. A group are `group` elements of
// the inner dimension, which share a scale and a zero; the last one may be shorter. Zeros of 4 bits
// are at most 128.
struct IntegerMatrix {
  const uint8_t* values;  // as above
  const void* scales;     // [tile][group][16 columns]
  const uint8_t* zeros;   // the same; null: 2^(bits - 1)
  int64_t columns, inner, group;
  int bits;           // 8 or 4
  DType scale_dtype;  // kFloat32, kFloat16 or kBFloat16

  int64_t tiles() const { return (columns + kIntegerTile - 1) / kIntegerTile; }
  int64_t steps() const { return (inner + kIntegerStep - 1) / kIntegerStep; }
  int64_t groups() const { return (inner + group - 1) / group; }
  int64_t tile_bytes() const { return steps() * kIntegerStep * kIntegerTile * bits / 8; }

  // Elements of a row of `x` that share a scale: the most of 128, 64 and 32 that divide a group. If
  // a group is a row, 128. The last block may be shorter.
  int64_t block() const {
    int64_t block = kLongestIntegerBlock;
    while (group < inner && group % block != 0) block /= 2;
    return block;
  }
};

// out[r][i] = sum over j of x[r][j] * matrix[i][j], plus bias[i] unless `bias` is null, rounded
// once to `dtype`. All are contiguous: `x` is [rows, inner], `out` [rows, columns]; none overlaps
// `out`.
//
// A row's block of `x` stands for round(127 x / m) m / 127, with m its largest magnitude. A block
// with a NaN or an infinity makes its row NaN; one below 2^-100 counts as zeros.
struct IntegerProduct {
  void* out;
  const void* x;
  const void* bias;
  int64_t rows;
  DType dtype;  // kFloat32 or kBFloat16
};

// Throws std::invalid_argument for other dtypes or bits, and for a `group` that is neither a
// multiple of kIntegerStep nor at least `inner`.
void integer_product(const IntegerProduct& product, const IntegerMatrix& matrix, int threads,
                     IntegerIsa isa = best_integer_isa());

// The product of pair p: row p * rows / pairs of `x` with matrix chosen[p] out of `experts` that
// lie one after another, each with its own values, scales, zeros and bias; `out` is [pairs,
// columns]. Every row of `x` has as many pairs, which follow each other. A pair has the bits of
// integer_product(). Of the matrices, only those that are chosen are read.
//
// Throws std::invalid_argument also unless `rows` divides `pairs` and all of `chosen` are in
// 0..experts - 1.
void integer_expert_product(const IntegerProduct& product, const IntegerMatrix& matrix,
                            const int64_t* chosen, int64_t pairs, int64_t experts, int threads,
                            IntegerIsa isa = best_integer_isa());

}  // namespace pipekernels
