#include "pipekernels/micro_batch/micro_batch_plan.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

namespace pipekernels {
namespace {

struct Dimension {
  int64_t size;
  int64_t src, dst;  // strides in bytes
};

using Dimensions = std::vector<Dimension>;  // outermost first

[[noreturn]] void reject(const std::string& why) {
  throw std::invalid_argument("copy_micro_batches: " + why);
}

void validate(const MicroBatchCopy& request) {
  using std::to_string;
  const size_t tensors = request.wholes.size();
  if (request.micro_batches.size() != tensors * request.sizes.size()) {
    reject(to_string(request.micro_batches.size()) + " microbatch tensors for " +
           to_string(tensors) + " tensors and " + to_string(request.sizes.size()) +
           " microbatches; give one for each pair");
  }
  int64_t total = 0;
  for (const int64_t size : request.sizes) {
    if (size < 0) reject("a microbatch of negative size " + to_string(size));
    if (__builtin_add_overflow(total, size, &total)) {
      reject("microbatches of more than " + to_string(std::numeric_limits<int64_t>::max()) +
             " entries");
    }
  }
  for (const WholeTensor& whole : request.wholes) {
    const auto dims = static_cast<int64_t>(whole.shape.size());
    if (whole.item_size <= 0)
      reject("item size " + to_string(whole.item_size) + " is not positive");
    if (whole.cast) {
      const auto [from, to] = *whole.cast;
      if (!is_floating(from) || !is_floating(to)) {
        reject(std::string("cannot cast ") + name_of(from) + " to " + name_of(to) +
               "; both must be float64, float32, float16 or bfloat16");
      }
      const DType dtype = request.direction == Direction::kSplit ? from : to;
      if (whole.item_size != static_cast<int64_t>(size_of(dtype))) {
        reject("item size " + to_string(whole.item_size) + " of a tensor of " + name_of(dtype));
      }
    }
    if (whole.strides.size() != whole.shape.size()) {
      reject("a tensor must have one stride per dimension");
    }
    if (request.dim < 0 || request.dim >= dims) {
      reject("dimension " + to_string(request.dim) + " of a tensor with " + to_string(dims));
    }
    if (whole.shape[request.dim] != total) {
      reject("microbatches hold " + to_string(total) + " entries, the tensor has " +
             to_string(whole.shape[request.dim]));
    }
  }
  for (size_t i = 0; i < request.micro_batches.size(); ++i) {
    if (request.micro_batches[i].strides.size() != request.wholes[i % tensors].shape.size()) {
      reject("a microbatch must have as many dimensions as its tensor");
    }
  }
}

// Sorts the dimensions by the destination's strides, outermost first, drops those of size one, and
// merges neighbours that form one dimension of constant stride in both tensors.
void simplify(Dimensions& dims) {
  const auto is_one = [](const Dimension& d) { return d.size == 1; };
  dims.erase(std::remove_if(dims.begin(), dims.end(), is_one), dims.end());
  std::sort(dims.begin(), dims.end(),
            [](const Dimension& a, const Dimension& b) { return a.dst > b.dst; });
  size_t merged = 0;
  for (const Dimension& d : dims) {
    if (merged > 0 && dims[merged - 1].src == d.src * d.size &&
        dims[merged - 1].dst == d.dst * d.size) {
      dims[merged - 1] = {dims[merged - 1].size * d.size, d.src, d.dst};
    } else {
      dims[merged++] = d;
    }
  }
  dims.resize(merged);
}

// Whether neighbours along `a` are closer together in the source than along `b`. A broadcast
// dimension (stride 0) has no neighbours to fetch together.
bool reads_before(const Dimension& a, const Dimension& b) {
  return a.src > 0 && (b.src == 0 || a.src < b.src);
}

// The dtypes of the source and the destination, and the sizes of an element, or of a unit, in each
// of them, in bytes. Without a cast, both dtypes are equal.
struct Units {
  DType from, to;
  int64_t src, dst;

  bool cast() const { return from != to; }
  int64_t wider() const { return std::max(src, dst); }
};

Units elements_of(const WholeTensor& whole) {
  if (!whole.cast) return {DType::kUInt8, DType::kUInt8, whole.item_size, whole.item_size};
  const auto [from, to] = *whole.cast;
  return {from, to, static_cast<int64_t>(size_of(from)), static_cast<int64_t>(size_of(to))};
}

// Makes the last dimension, which counts contiguous elements, count the widest units to which all
// addresses and strides are aligned. Returns these units.
Units widen(Dimensions& dims, const char* src, const char* dst, const Units& elements) {
  Dimension& last = dims.back();
  auto src_bits = reinterpret_cast<uintptr_t>(src), dst_bits = reinterpret_cast<uintptr_t>(dst);
  for (size_t i = 0; i + 1 < dims.size(); ++i) {
    src_bits |= dims[i].src;
    dst_bits |= dims[i].dst;
  }
  const auto aligned = [&](int64_t count) {
    return ((src_bits & (count * elements.src - 1)) | (dst_bits & (count * elements.dst - 1)) |
            (last.size & (count - 1))) == 0;
  };
  int64_t count = 16 / elements.wider();
  while (count > 1 && !aligned(count)) count = elements.cast() ? 1 : count / 2;
  if (!aligned(count)) {
    reject(std::string("a tensor to cast from ") + name_of(elements.from) + " to " +
           name_of(elements.to) + " is not aligned to its elements; clone() it");
  }
  const Units units{elements.from, elements.to, count * elements.src, count * elements.dst};
  last = {last.size / count, units.src, units.dst};
  if (last.size == 1 && dims.size() > 1) dims.pop_back();
  return units;
}

// The largest power of two whose square is at most `area`.
int64_t square_side(int64_t area) {
  int64_t side = 1;
  while (4 * side * side <= area) side *= 2;
  return side;
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// At most `count` of a dimension, so that they span less than half of kTileExtent.
int64_t within_extent(const Dimension& dimension, int64_t count) {
  const int64_t stride = std::max({std::abs(dimension.src), std::abs(dimension.dst), int64_t{1}});
  const int64_t most = std::max<int64_t>(kTileExtent / 2 / stride, 1);
  return std::min({dimension.size, count, most});
}

// The most that is a multiple of `pack`, if there is one.
int64_t whole_blocks(int64_t count, int64_t pack) {
  return count < pack ? count : count / pack * pack;
}

// TiledCopy::pack of a transposed copy.
int64_t pack_of(const char* src, const char* dst, const Units& units, const Dimensions& outer,
                const Dimension& rows, const Dimension& cols) {
  if (units.cast() || units.src >= 4 || rows.src != units.src || cols.dst != units.dst) return 1;
  const int64_t pack = 4 / units.src;
  uint64_t bits = reinterpret_cast<uintptr_t>(src) | reinterpret_cast<uintptr_t>(dst);
  for (const Dimension& d : outer) bits |= d.src | d.dst;
  bits |= cols.src | rows.dst | (rows.size * units.src) | (cols.size * units.src);
  const bool spans = within_extent(rows, pack) < pack || within_extent(cols, pack) < pack;
  return bits % 4 != 0 || spans ? 1 : pack;
}

class Planner {
 public:
  Planner(const TileShape& shape, size_t copies) : shape_(shape) { plan_.copies.reserve(copies); }

  // Modifies `dims`.
  void add(const char* src, char* dst, Units elements, Dimensions& dims) {
    const auto is_empty = [](const Dimension& d) { return d.size == 0; };
    if (std::any_of(dims.begin(), dims.end(), is_empty)) return;
    int64_t bytes = elements.wider();
    bool fits = true;
    for (const Dimension& d : dims) fits = fits && !__builtin_mul_overflow(bytes, d.size, &bytes);
    if (!fits || __builtin_add_overflow(plan_.bytes, bytes, &plan_.bytes)) {
      reject("more than " + std::to_string(std::numeric_limits<int64_t>::max()) + " bytes");
    }
    plan_.casts = plan_.casts || elements.cast();
    simplify(dims);
    if (dims.empty() || dims.back().src != elements.src || dims.back().dst != elements.dst) {
      dims.push_back({1, elements.src, elements.dst});
    }
    if (!elements.cast()) {
      dims.back() = {dims.back().size * elements.src, 1, 1};
      elements.src = elements.dst = 1;
    }
    const Units units = widen(dims, src, dst, elements);
    emit(src, dst, units, dims);
  }

  Plan take() { return std::move(plan_); }

 private:
  void emit(const char* src, char* dst, const Units& units, Dimensions& dims) {
    constexpr size_t kDims = 4;
    if (dims.size() > kDims) {  // peel the smallest dimension, but never the columns
      const auto smallest =
          std::min_element(dims.begin(), dims.end() - 1,
                           [](const Dimension& a, const Dimension& b) { return a.size < b.size; });
      const Dimension peeled = *smallest;
      dims.erase(smallest);
      for (int64_t i = 0; i < peeled.size; ++i) {
        Dimensions rest = dims;
        emit(src + i * peeled.src, dst + i * peeled.dst, units, rest);
      }
      return;
    }
    const Dimension cols = dims.back();
    dims.pop_back();
    const auto fastest = std::min_element(dims.begin(), dims.end(), reads_before);
    const bool transposed = fastest != dims.end() && cols.src > 0 && reads_before(*fastest, cols);
    Dimension rows{1, 0, 0};
    if (!dims.empty()) {
      const auto chosen = transposed ? fastest : dims.end() - 1;
      rows = *chosen;
      dims.erase(chosen);
    }
    dims.insert(dims.begin(), 2 - dims.size(), Dimension{1, 0, 0});

    // If one dimension is shorter than the tile, the tile extends along the other.
    const int64_t area = (transposed ? shape_.transposed_bytes : shape_.run_bytes) / units.wider();
    const int64_t pack = transposed ? pack_of(src, dst, units, dims, rows, cols) : 1;
    int64_t tile_cols = std::min(cols.size, transposed ? square_side(area) : area);
    const int64_t tile_rows = whole_blocks(within_extent(rows, area / tile_cols), pack);
    tile_cols = whole_blocks(within_extent(cols, area / tile_rows), pack);

    const int64_t row_tiles = divide_up(rows.size, tile_rows);
    const int64_t col_tiles = divide_up(cols.size, tile_cols);
    const int64_t tiles = dims[0].size * dims[1].size * row_tiles * col_tiles;
    if (tiles > std::numeric_limits<int32_t>::max()) {
      Dimensions all{dims[0], dims[1], rows, cols};
      emit_halves(src, dst, units, all);
      return;
    }
    const auto divisor = [&](int64_t value) { return Divisor::by(static_cast<uint32_t>(value)); };
    TiledCopy copy{src,
                   dst,
                   {dims[0].src, dims[1].src},
                   {dims[0].dst, dims[1].dst},
                   rows.src,
                   rows.dst,
                   cols.src,
                   cols.dst,
                   plan_.tiles,
                   static_cast<int32_t>(dims[0].size),
                   divisor(dims[1].size),
                   divisor(row_tiles),
                   divisor(col_tiles),
                   divisor(tile_rows / pack),
                   divisor((rows.size - (row_tiles - 1) * tile_rows) / pack),
                   divisor(tile_cols / pack),
                   divisor((cols.size - (col_tiles - 1) * tile_cols) / pack),
                   static_cast<uint8_t>(units.src),
                   static_cast<uint8_t>(units.dst),
                   units.from,
                   units.to,
                   transposed,
                   static_cast<uint8_t>(pack)};
    plan_.tiles += tiles;
    plan_.copies.push_back(copy);
  }

  // Emits the two halves of the longest dimension.
  void emit_halves(const char* src, char* dst, const Units& units, Dimensions& dims) {
    const auto longest =
        std::max_element(dims.begin(), dims.end(),
                         [](const Dimension& a, const Dimension& b) { return a.size < b.size; });
    const int64_t half = longest->size / 2, rest = longest->size - half;
    const int64_t src_step = half * longest->src, dst_step = half * longest->dst;
    Dimensions first = dims;
    first[longest - dims.begin()].size = half;
    longest->size = rest;
    emit(src, dst, units, first);
    emit(src + src_step, dst + dst_step, units, dims);
  }

  TileShape shape_;
  Plan plan_;
};

}  // namespace

Plan plan_tiles(const MicroBatchCopy& request, const TileShape& shape) {
  validate(request);
  const size_t tensors = request.wholes.size();
  Planner planner(shape, request.micro_batches.size());
  Dimensions dims;    // reused, since there may be many small copies
  int64_t start = 0;  // the microbatch's first index along the batch dimension
  for (size_t i = 0; i < request.sizes.size(); ++i) {
    for (size_t t = 0; t < tensors; ++t) {
      const WholeTensor& whole = request.wholes[t];
      const MicroBatch& part = request.micro_batches[i * tensors + t];
      const bool split = request.direction == Direction::kSplit;
      const Units elements = elements_of(whole);
      const int64_t part_item = split ? elements.dst : elements.src;
      dims.resize(whole.shape.size());
      for (size_t d = 0; d < dims.size(); ++d) {
        const int64_t size =
            static_cast<int64_t>(d) == request.dim ? request.sizes[i] : whole.shape[d];
        const int64_t in_whole = whole.strides[d] * whole.item_size;
        const int64_t in_part = part.strides[d] * part_item;
        dims[d] = split ? Dimension{size, in_whole, in_part} : Dimension{size, in_part, in_whole};
      }
      char* slice = whole.data + start * whole.strides[request.dim] * whole.item_size;
      if (split) {
        planner.add(slice, part.data, elements, dims);
      } else {
        planner.add(part.data, slice, elements, dims);
      }
    }
    start += request.sizes[i];
  }
  return planner.take();
}

}  // namespace pipekernels
