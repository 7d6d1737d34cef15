// Splitting and concatenating against an element-by-element oracle, over random shapes, strides and
// alignments, with and without casts; on the CPU, and by the tile functions of CUDA blocks.
#include "pipekernels/micro_batch/micro_batch.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <thread>

#include "check.h"
#include "micro_batch_tiles.h"
#include "openmp.h"
#include "pipekernels/elements/elements.h"
#include "pipekernels/micro_batch/micro_batch_plan.h"

namespace {

using namespace pipekernels;
using Integers = std::vector<int64_t>;
using Random = std::mt19937;

int64_t uniform(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

// A tensor with its own memory: dimensions laid out in a random order, with gaps, at a random
// offset.
struct Tensor {
  Integers shape, strides;
  int64_t item_size;
  std::vector<char> memory;
  int64_t offset;  // bytes

  // Elements are sometimes not aligned to their size, unless `aligned`.
  Tensor(Integers shape_in, int64_t item, bool contiguous, bool aligned, Random& random)
      : shape(std::move(shape_in)), strides(shape.size()), item_size(item) {
    std::vector<size_t> order(shape.size());
    std::iota(order.rbegin(), order.rend(), size_t{0});
    if (!contiguous) std::shuffle(order.begin(), order.end(), random);
    int64_t stride = 1;
    for (const size_t d : order) {
      if (!contiguous) stride *= uniform(random, 1, 2);
      strides[d] = stride;
      stride *= std::max<int64_t>(shape[d], 1);
    }
    offset = uniform(random, 0, 1) * item_size + (!aligned && uniform(random, 0, 9) == 0 ? 1 : 0);
    memory.resize(stride * item_size + 2 * item_size + 1);
  }

  char* data() { return memory.data() + offset; }

  int64_t count() const {
    return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>());
  }

  // Element `index` in row-major order.
  char* at(int64_t index) {
    int64_t place = 0;
    for (size_t d = shape.size(); d-- > 0;) {
      place += index % shape[d] * strides[d];
      index /= shape[d];
    }
    return data() + place * item_size;
  }
};

void copy_element(const std::optional<Cast>& cast, const char* from, char* to, int64_t size) {
  if (!cast || cast->from == cast->to) {
    std::memcpy(to, from, size);
    return;
  }
  with_floating_element(cast->from, [&](auto source) {
    with_floating_element(cast->to, [&](auto target) {
      using From = decltype(source);
      using To = decltype(target);
      typename From::Element element;
      std::memcpy(&element, from, sizeof(element));
      const auto converted = convert_element<From, To>(element);
      std::memcpy(to, &converted, sizeof(converted));
    });
  });
}

// Tensors and their microbatches. If a split casts a tensor, a concatenation casts it back.
struct Case {
  Integers sizes;
  int64_t dim = 0;
  std::vector<Tensor> wholes, parts;
  std::vector<std::optional<Cast>> casts;  // of each tensor, in a split

  Case(Random& random, int64_t max_size, bool casting) {
    dim = uniform(random, 0, 2);
    for (int64_t i = uniform(random, 1, 4); i > 0; --i) sizes.push_back(uniform(random, 0, 3));
    const int64_t batch = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    for (int64_t t = uniform(random, 1, 3); t > 0; --t) {
      Integers shape(uniform(random, dim + 1, 6));
      for (int64_t& size : shape) size = uniform(random, 1, shape.size() > 3 ? 3 : max_size);
      shape[dim] = batch;
      int64_t item_size = int64_t{1} << uniform(random, 0, 4);
      casts.emplace_back();
      if (casting && uniform(random, 0, 4) > 0) {
        const auto dtype = [&] {
          return static_cast<DType>(uniform(random, 0, kFloatingDTypes - 1));
        };
        casts.back() = Cast{dtype(), dtype()};
        item_size = size_of(casts.back()->from);
      }
      wholes.emplace_back(shape, item_size, uniform(random, 0, 1), casting, random);
    }
    for (const int64_t size : sizes) {
      for (size_t t = 0; t < wholes.size(); ++t) {
        Integers shape = wholes[t].shape;
        shape[dim] = size;
        const int64_t item_size = casts[t] ? size_of(casts[t]->to) : wholes[t].item_size;
        parts.emplace_back(shape, item_size, uniform(random, 0, 1), casting, random);
      }
    }
  }

  std::optional<Cast> cast(Direction direction, size_t t) const {
    if (direction == Direction::kSplit || !casts[t]) return casts[t];
    return Cast{casts[t]->to, casts[t]->from};
  }

  MicroBatchCopy request(Direction direction) {
    MicroBatchCopy copy{direction, dim, sizes, {}, {}};
    for (size_t t = 0; t < wholes.size(); ++t) {
      Tensor& w = wholes[t];
      copy.wholes.push_back({w.data(), w.item_size, w.shape, w.strides, cast(direction, t)});
    }
    for (Tensor& p : parts) copy.micro_batches.push_back({p.data(), p.strides});
    return copy;
  }

  // Random bytes; without NaN where elements are cast, since a cast may change the payload of a
  // NaN.
  void fill(Random& random) {
    const bool casting = std::any_of(casts.begin(), casts.end(), [](auto& c) { return !!c; });
    for (auto* tensors : {&wholes, &parts}) {
      for (Tensor& t : *tensors) {
        for (char& byte : t.memory) byte = static_cast<char>(casting ? random() % 64 : random());
      }
    }
  }

  void copy_elementwise(Direction direction) {
    int64_t start = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      for (size_t t = 0; t < wholes.size(); ++t) {
        Tensor& part = parts[i * wholes.size() + t];
        Tensor slice = wholes[t];  // used only for offsets; the memory is that of wholes[t]
        slice.shape[dim] = sizes[i];
        const int64_t begin = start * slice.strides[dim] * slice.item_size;
        for (int64_t k = 0; k < part.count(); ++k) {
          char* in_whole = wholes[t].data() + (slice.at(k) - slice.data()) + begin;
          char* in_part = part.at(k);
          const bool split = direction == Direction::kSplit;
          copy_element(cast(direction, t), split ? in_whole : in_part, split ? in_part : in_whole,
                       part.item_size);
        }
      }
      start += sizes[i];
    }
  }

  bool same_bytes(const Case& other) const {
    const auto equal = [](const Tensor& a, const Tensor& b) { return a.memory == b.memory; };
    return std::equal(wholes.begin(), wholes.end(), other.wholes.begin(), equal) &&
           std::equal(parts.begin(), parts.end(), other.parts.begin(), equal);
  }
};

void test_against_oracle(bool casting) {
  Random random(1);
  for (int round = 0; round < (casting ? 500 : 1500); ++round) {
    Case ours(random, round % 10 == 0 ? 90 : 12, casting);
    for (const Direction direction : {Direction::kSplit, Direction::kConcat}) {
      ours.fill(random);
      Case expected = ours, tiled = ours;
      expected.copy_elementwise(direction);
      copy_micro_batches(ours.request(direction), 3);
      CHECK(ours.same_bytes(expected));
      const TileShape shape{64 << uniform(random, 0, 4), 64 << uniform(random, 0, 4)};
      const int threads = static_cast<int>(uniform(random, 1, 40));
      copy_by_tiles(plan_tiles(tiled.request(direction), shape), shape, threads);
      CHECK(tiled.same_bytes(expected));
    }
  }
}

// Every cast of the widest units, with contiguous rows, and transposed: with the source's first two
// dimensions swapped.
void test_wide_casts() {
  for (int i = 0; i < kFloatingDTypes * kFloatingDTypes; ++i) {
    const Cast cast{static_cast<DType>(i / kFloatingDTypes),
                    static_cast<DType>(i % kFloatingDTypes)};
    if (cast.from == cast.to) continue;
    const auto from = static_cast<int64_t>(size_of(cast.from));
    const auto to = static_cast<int64_t>(size_of(cast.to));
    const int64_t unit = 16 / std::max(from, to);
    constexpr int64_t kRows = 21, kCols = 10;
    alignas(16) char source[kRows * kCols * 16], target[sizeof(source)], expected[sizeof(source)];
    for (size_t b = 0; b < sizeof(source); ++b) source[b] = static_cast<char>(b % 61);
    for (const bool swapped : {false, true}) {
      const Integers strides =
          swapped ? Integers{unit, kRows * unit, 1} : Integers{kCols * unit, unit, 1};
      MicroBatchCopy request{Direction::kSplit, 0, {kRows}, {}, {}};
      request.wholes.push_back({source, from, {kRows, kCols, unit}, strides, cast});
      request.micro_batches.push_back({target, {kCols * unit, unit, 1}});
      for (int64_t k = 0; k < kRows * kCols * unit; ++k) {
        const int64_t row = k / unit / kCols, col = k / unit % kCols;
        copy_element(cast, source + from * (row * strides[0] + col * strides[1] + k % unit),
                     expected + to * k, to);
      }
      const TileShape shape{256, 1024};
      const Plan plan = plan_tiles(request, shape);
      CHECK(plan.copies.size() == 1 && plan.copies[0].src_unit == unit * from);
      CHECK(plan.copies[0].transposed == swapped);
      copy_by_tiles(plan, shape, 7);
      CHECK(std::memcmp(target, expected, to * kRows * kCols * unit) == 0);
      std::memset(target, 0, sizeof(target));
      copy_micro_batches(request, 1);
      CHECK(std::memcmp(target, expected, to * kRows * kCols * unit) == 0);
    }
  }
}

// More copies than one launch can hold, including empty ones.
void test_many_copies() {
  constexpr int64_t kCopies = 700;
  std::vector<float> whole(3 * kCopies), parts(whole.size());
  std::iota(whole.begin(), whole.end(), 0.0f);
  MicroBatchCopy request{Direction::kSplit, 0, {}, {}, {}};
  int64_t rows = 0;
  for (int64_t i = 0; i < kCopies; ++i) {
    request.sizes.push_back(i % 3);
    request.micro_batches.push_back({reinterpret_cast<char*>(&parts[rows]), {1}});
    rows += i % 3;
  }
  request.wholes.push_back({reinterpret_cast<char*>(whole.data()), 4, {rows}, {1}});
  const TileShape shape{64, 64};
  const Plan plan = plan_tiles(request, shape);
  const int count = static_cast<int>(plan.copies.size());
  for (int64_t index = 0, i = 0; index < plan.tiles; ++index) {
    while (i + 1 < count && plan.copies[i + 1].first_tile <= index) ++i;
    CHECK(copy_of_tile(plan.copies.data(), count, index) == i);
  }
  copy_by_tiles(plan, shape, 32);
  CHECK(std::equal(whole.begin(), whole.begin() + rows, parts.begin()));
}

void test_broadcast_source() {
  std::vector<int32_t> row{1, 2, 3}, split(2 * 300 * 3);
  MicroBatchCopy request{Direction::kSplit, 0, {1, 1}, {}, {}};
  request.wholes.push_back({reinterpret_cast<char*>(row.data()), 4, {2, 3, 300}, {0, 1, 0}});
  for (int i = 0; i < 2; ++i) {
    request.micro_batches.push_back({reinterpret_cast<char*>(&split[i * 900]), {900, 300, 1}});
  }
  copy_micro_batches(request, 1);
  for (size_t i = 0; i < split.size(); ++i) CHECK(split[i] == row[i / 300 % 3]);
}

// Large enough to be copied by several threads.
void split_large() {
  const int64_t rows = 512, cols = 700;
  std::vector<float> whole(rows * cols), parts(rows * cols);
  std::iota(whole.begin(), whole.end(), 0.0f);
  MicroBatchCopy request{Direction::kSplit, 0, {cols / 2, cols / 2}, {}, {}};
  request.wholes.push_back({reinterpret_cast<char*>(whole.data()), 4, {cols, rows}, {1, cols}});
  for (int i = 0; i < 2; ++i) {
    char* part = reinterpret_cast<char*>(&parts[i * rows * cols / 2]);
    request.micro_batches.push_back({part, {rows, 1}});
  }
  copy_micro_batches(request, 4);
  for (int64_t c = 0; c < cols; ++c) {
    for (int64_t r = 0; r < rows; ++r) CHECK(parts[c * rows + r] == whole[r * cols + c]);
  }
}

void test_concurrent_callers() {
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([] {
      for (int round = 0; round < 20; ++round) split_large();
    });
  }
  for (std::thread& caller : callers) caller.join();
}

void check_rejected(const MicroBatchCopy& request) {
  bool thrown = false;
  try {
    copy_micro_batches(request, 1);
  } catch (const std::invalid_argument&) {
    thrown = true;
  }
  CHECK(thrown);
}

void test_rejects() {
  alignas(4) char data[16] = {};
  const MicroBatchCopy good{
      Direction::kSplit, 0, {1, 1}, {{data, 4, {2}, {1}}}, {{data + 8, {1}}, {data + 12, {1}}}};
  copy_micro_batches(good, 1);
  MicroBatchCopy bad = good;
  bad.dim = 1;
  check_rejected(bad);
  bad = good;
  bad.sizes = {1, 2};
  check_rejected(bad);
  bad = good;
  bad.sizes = {3, -1};
  check_rejected(bad);
  bad = good;
  bad.micro_batches.pop_back();
  check_rejected(bad);
  bad = good;
  bad.micro_batches[0].strides = {1, 1};
  check_rejected(bad);
  bad = good;
  bad.wholes[0].strides.clear();
  check_rejected(bad);
  bad = good;
  bad.wholes[0].item_size = 0;
  check_rejected(bad);
  bad = good;
  bad.wholes[0].cast = Cast{DType::kFloat32, DType::kInt32};
  check_rejected(bad);
  bad.wholes[0].cast = Cast{DType::kFloat16, DType::kFloat32};  // item_size is 4, not 2
  check_rejected(bad);
  bad.wholes[0].cast = Cast{DType::kFloat32, DType::kFloat16};
  copy_micro_batches(bad, 1);
  bad.micro_batches[1].data += 1;
  check_rejected(bad);
}

}  // namespace

int main() {
  test_against_oracle(false);
  test_against_oracle(true);
  test_wide_casts();
  test_many_copies();
  test_broadcast_source();
  test_concurrent_callers();
  test_rejects();
}
