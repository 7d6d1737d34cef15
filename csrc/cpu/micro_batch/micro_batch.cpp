#include "pipekernels/micro_batch/micro_batch.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "pipekernels/elements/cast.h"
#include "pipekernels/host/parallel_for.h"
#include "pipekernels/micro_batch/micro_batch_plan.h"

namespace pipekernels {
namespace {

constexpr TileShape kTiles{64 * 1024, 16 * 1024};  // a transposed tile fits into half an L1 cache
// Up to this size, a second thread costs more than it saves.
constexpr int64_t kInlineBytes = 512 * 1024;
constexpr int64_t kPiecesPerThread = 4;  // small pieces, so that a late thread delays the end less

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

// Calls body(std::integral_constant<int, unit>()).
template <class Body>
void with_unit(int unit, const Body& body) {
  switch (unit) {
    case 1:
      return body(std::integral_constant<int, 1>());
    case 2:
      return body(std::integral_constant<int, 2>());
    case 4:
      return body(std::integral_constant<int, 4>());
    case 8:
      return body(std::integral_constant<int, 8>());
    default:
      return body(std::integral_constant<int, 16>());
  }
}

// The cases differ only in which strides are compile-time constants, which lets the compiler
// vectorise the loop.
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

// Copies a tile to `staged`, row-major without gaps, reading column by column.
template <int kUnit>
void stage_columns(const TiledCopy& copy, const Tile& tile, char* staged) {
  const int64_t pitch = static_cast<int64_t>(tile.cols) * kUnit;
  for (int32_t c = 0; c < tile.cols; ++c) {
    const char* src = tile.src + c * copy.src_col;
    if (copy.src_row == kUnit) {
      copy_row<kUnit>(staged + c * kUnit, pitch, src, kUnit, tile.rows);
    } else {
      copy_row<kUnit>(staged + c * kUnit, pitch, src, copy.src_row, tile.rows);
    }
  }
}

// Copies through a buffer of one tile. Each cache line of the source is read completely at once,
// and each line of the destination written completely at once, even if their strides map to the
// same cache sets.
template <int kUnit>
void copy_transposed(const TiledCopy& copy, const Tile& tile) {
  alignas(64) char staged[kTiles.transposed_bytes];
  stage_columns<kUnit>(copy, tile, staged);
  const int64_t pitch = static_cast<int64_t>(tile.cols) * kUnit;
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

// As memcpy(), for at least kLine bytes. For runs of a few lines, calling memcpy() and its choice
// of a method take longer than the copy itself.
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
  const int64_t run = static_cast<int64_t>(tile.cols) * copy.src_unit;
  if (copy.src_col == copy.src_unit && copy.dst_col == copy.src_unit && run >= kLine) {
    for (int32_t r = 0; r < tile.rows; ++r) {
      copy_run(tile.dst + r * copy.dst_row, tile.src + r * copy.src_row, run);
    }
    return;
  }
  with_unit(copy.src_unit, [&](auto unit) { copy_units<unit>(copy, tile); });
}

// Cast kernels need contiguous elements, so strided ones are gathered before the cast, and
// scattered after it, a block at a time.
void cast_tile(const TiledCopy& copy, const Tile& tile) {
  constexpr int32_t kBlock = 256, kWidest = 16;
  alignas(64) char staged[kTiles.transposed_bytes];
  alignas(64) char converted[kBlock * kWidest];
  static_assert(sizeof(staged) >= sizeof(converted));
  const CastKernel cast = cast_kernel(copy.from, copy.to);
  const size_t unit = copy.src_unit / size_of(copy.from);  // elements
  const char* src = tile.src;
  int64_t src_row = copy.src_row, src_col = copy.src_col;
  if (copy.transposed) {
    with_unit(copy.src_unit, [&](auto bytes) { stage_columns<bytes>(copy, tile, staged); });
    src = staged;
    src_row = static_cast<int64_t>(tile.cols) * copy.src_unit;
    src_col = copy.src_unit;
  }
  const bool gathers = src_col != copy.src_unit, scatters = copy.dst_col != copy.dst_unit;
  const int32_t block = gathers || scatters ? kBlock : tile.cols;
  for (int32_t r = 0; r < tile.rows; ++r) {
    for (int32_t c = 0; c < tile.cols; c += block) {
      const int32_t count = std::min(block, tile.cols - c);
      const char* from = src + r * src_row + c * src_col;
      char* to = tile.dst + r * copy.dst_row + c * copy.dst_col;
      if (gathers) {
        with_unit(copy.src_unit,
                  [&](auto bytes) { copy_row<bytes>(staged, bytes, from, src_col, count); });
        from = staged;
      }
      cast(scatters ? converted : to, from, count * unit);
      if (scatters) {
        with_unit(copy.dst_unit,
                  [&](auto bytes) { copy_row<bytes>(to, copy.dst_col, converted, bytes, count); });
      }
    }
  }
}

void copy_tiles(const Plan& plan, int64_t begin, int64_t end) {
  const int count = static_cast<int>(plan.copies.size());
  int i = copy_of_tile(plan.copies.data(), count, begin);
  for (int64_t index = begin; index < end; ++index) {
    while (i + 1 < count && plan.copies[i + 1].first_tile <= index) ++i;
    const TiledCopy& copy = plan.copies[i];
    (copy.casts() ? cast_tile : copy_tile)(copy, tile_at(copy, index));
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
