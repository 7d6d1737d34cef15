#include "pipekernels/micro_batch.h"

#include <algorithm>
#include <cstring>

#include "pipekernels/micro_batch_plan.h"
#include "pipekernels/parallel_for.h"

namespace pipekernels {
namespace {

constexpr TileShape kTiles{64 * 1024, 16 * 1024};  // a transposed one fits into half of an L1 cache
// Up to so many bytes, a second thread costs more than it saves.
constexpr int64_t kInlineBytes = 512 * 1024;
constexpr int64_t kPiecesPerThread = 4;  // so that a late thread leaves little to wait for

template <int kUnit>
void copy_row(char* dst, int64_t dst_stride, const char* src, int64_t src_stride, int32_t count) {
  for (int32_t i = 0; i < count; ++i)
    std::memcpy(dst + i * dst_stride, src + i * src_stride, kUnit);
}

template <int kUnit>
void fill_row(char* dst, const char* src, int32_t count) {
  char pattern[256];
  const int32_t per_pattern = sizeof(pattern) / kUnit;
  for (int32_t i = 0; i < per_pattern; ++i) std::memcpy(pattern + i * kUnit, src, kUnit);
  for (; count > per_pattern; count -= per_pattern, dst += sizeof(pattern)) {
    std::memcpy(dst, pattern, sizeof(pattern));
  }
  std::memcpy(dst, pattern, count * kUnit);
}

// A stride that the compiler knows makes a loop of copies a vectorised one.
template <int kUnit>
void copy_rows(const TiledCopy& copy, const Tile& tile) {
  for (int32_t r = 0; r < tile.rows; ++r) {
    const char* src = tile.src + r * copy.src_row;
    char* dst = tile.dst + r * copy.dst_row;
    if (copy.dst_col != kUnit) {
      copy_row<kUnit>(dst, copy.dst_col, src, copy.src_col, tile.cols);
    } else if (copy.src_col == kUnit) {
      copy_row<kUnit>(dst, kUnit, src, kUnit, tile.cols);
    } else if (copy.src_col == 0) {
      fill_row<kUnit>(dst, src, tile.cols);
    } else {
      copy_row<kUnit>(dst, kUnit, src, copy.src_col, tile.cols);
    }
  }
}

// Through a buffer of one tile: each line of the source is read once and whole, each line of the
// destination written once and whole, however their strides fall into the cache's sets.
template <int kUnit>
void copy_transposed(const TiledCopy& copy, const Tile& tile) {
  alignas(64) char staged[kTiles.transposed_bytes];
  const int64_t pitch = static_cast<int64_t>(tile.cols) * kUnit;
  for (int32_t c = 0; c < tile.cols; ++c) {
    const char* src = tile.src + c * copy.src_col;
    if (copy.src_row == kUnit) {
      copy_row<kUnit>(staged + c * kUnit, pitch, src, kUnit, tile.rows);
    } else {
      copy_row<kUnit>(staged + c * kUnit, pitch, src, copy.src_row, tile.rows);
    }
  }
  for (int32_t r = 0; r < tile.rows; ++r) {
    char* dst = tile.dst + r * copy.dst_row;
    if (copy.dst_col == kUnit) {
      std::memcpy(dst, staged + r * pitch, pitch);
    } else {
      copy_row<kUnit>(dst, copy.dst_col, staged + r * pitch, kUnit, tile.cols);
    }
  }
}

template <int kUnit>
void copy_units(const TiledCopy& copy, const Tile& tile) {
  copy.transposed ? copy_transposed<kUnit>(copy, tile) : copy_rows<kUnit>(copy, tile);
}

constexpr int64_t kLine = 64;  // bytes

// As memcpy, of a line at least; for runs of a few lines, where its call and its choice of a method
// take longer than the copy itself.
void copy_run(char* dst, const char* src, int64_t bytes) {
  constexpr int64_t kLines = 16;
  if (bytes > kLines * kLine) {
    std::memcpy(dst, src, bytes);
    return;
  }
  for (int64_t i = 0; i < bytes - kLine; i += kLine) std::memcpy(dst + i, src + i, kLine);
  std::memcpy(dst + bytes - kLine, src + bytes - kLine, kLine);  // overlaps the one before
}

void copy_tile(const TiledCopy& copy, const Tile& tile) {
  const int64_t run = static_cast<int64_t>(tile.cols) * copy.unit;
  if (copy.src_col == copy.unit && copy.dst_col == copy.unit && run >= kLine) {
    for (int32_t r = 0; r < tile.rows; ++r) {
      copy_run(tile.dst + r * copy.dst_row, tile.src + r * copy.src_row, run);
    }
    return;
  }
  switch (copy.unit) {
    case 1:
      return copy_units<1>(copy, tile);
    case 2:
      return copy_units<2>(copy, tile);
    case 4:
      return copy_units<4>(copy, tile);
    case 8:
      return copy_units<8>(copy, tile);
    default:
      return copy_units<16>(copy, tile);
  }
}

void copy_tiles(const Plan& plan, int64_t begin, int64_t end) {
  const int count = static_cast<int>(plan.copies.size());
  int i = copy_of_tile(plan.copies.data(), count, begin);
  for (int64_t index = begin; index < end; ++index) {
    while (i + 1 < count && plan.copies[i + 1].first_tile <= index) ++i;
    copy_tile(plan.copies[i], tile_at(plan.copies[i], index));
  }
}

}  // namespace

void copy_micro_batches(const MicroBatchCopy& request, int threads) {
  const Plan plan = plan_tiles(request, kTiles);
  if (threads <= 1 || plan.bytes <= kInlineBytes) {
    copy_tiles(plan, 0, plan.tiles);
    return;
  }
  const int64_t pieces = std::min(plan.tiles, threads * kPiecesPerThread);
  parallel_for(pieces, threads, [&](int64_t i) {
    copy_tiles(plan, plan.tiles * i / pieces, plan.tiles * (i + 1) / pieces);
  });
}

}  // namespace pipekernels
