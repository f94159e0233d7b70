//===- ChunksTest.cpp - holes, overlaps, and gathering of boxes -----------===//
#include "fsdp/Runtime/Checkpoint/Chunks.h"
#include "Support/Sanitizers.h"
#include "fsdp/Runtime/Error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <numeric>
#include <random>

namespace fsdp::test {
namespace {

using runtime::Chunk;
using runtime::SavedTensor;
using testing::AllOf;
using testing::HasSubstr;

/// A tensor of int32 whose elements are 0, 1, ..., cut into chunks.
class Cut {
public:
  explicit Cut(std::vector<int64_t> shape) {
    tensor.spec = {std::move(shape), plan::DType::Int32};
  }
  Cut &add(const Chunk &chunk) {
    std::vector<int32_t> &data =
        memory.emplace_back(elements(tensor.spec.shape, chunk));
    tensor.chunks.push_back({chunk, std::as_bytes(std::span(data)),
                             "f" + std::to_string(tensor.chunks.size())});
    return *this;
  }
  /// The elements of a box of a tensor, row-major.
  static std::vector<int32_t> elements(const std::vector<int64_t> &shape,
                                       const Chunk &box) {
    std::vector<int32_t> all = {0};
    for (size_t dim = 0; dim < shape.size(); ++dim) {
      std::vector<int32_t> next;
      for (int32_t before : all)
        for (int64_t i = 0; i < box.sizes[dim]; ++i)
          next.push_back(int32_t(before * shape[dim] + box.offsets[dim] + i));
      all = std::move(next);
    }
    return all;
  }
  std::string error() const {
    try {
      checkTiling("folder", "w", tensor);
    } catch (const runtime::InputError &error) {
      return error.what();
    }
    return "";
  }

  SavedTensor tensor;

private:
  std::deque<std::vector<int32_t>> memory;
};

TEST(Chunks, TileATensor) {
  EXPECT_EQ(Cut({4}).add({{0}, {3}}).add({{3}, {1}}).error(), "");
  EXPECT_EQ(Cut({}).add({{}, {}}).error(), "");
  EXPECT_EQ(Cut({0, 3}).error(), "");
  EXPECT_EQ(Cut({0, 3}).add({{0, 0}, {0, 3}}).error(), "");
  // An empty chunk behind the end, as DCP stores those of ranks without rows.
  EXPECT_EQ(Cut({2}).add({{2}, {0}}).add({{0}, {2}}).error(), "");
  // No straight line divides these five.
  Cut windmill({3, 3});
  windmill.add({{0, 0}, {1, 2}}).add({{0, 2}, {2, 1}}).add({{2, 1}, {1, 2}});
  windmill.add({{1, 0}, {2, 1}}).add({{1, 1}, {1, 1}});
  EXPECT_EQ(windmill.error(), "");
}

TEST(Chunks, NamesHoles) {
  EXPECT_EQ(Cut({4}).add({{0}, {1}}).add({{3}, {1}}).error(),
            "folder: tensor \"w\": no file has [1:3] of int32[4]");
  EXPECT_EQ(Cut({}).error(), "folder: tensor \"w\": no file has [] of int32[]");
  EXPECT_EQ(Cut({2, 2}).add({{0, 0}, {2, 1}}).error(),
            "folder: tensor \"w\": no file has [0:2, 1:2] of int32[2, 2]");
  // Volumes add up to that of the tensor.
  EXPECT_THAT(Cut({4}).add({{0}, {2}}).add({{1}, {2}}).error(), HasSubstr("["));
}

TEST(Chunks, NamesOverlaps) {
  EXPECT_EQ(Cut({4}).add({{0}, {3}}).add({{2}, {2}}).error(),
            "folder: tensor \"w\": [2:3] of int32[4] appears twice, in f0 and "
            "f1");
  EXPECT_THAT(Cut({}).add({{}, {}}).add({{}, {}}).error(),
              HasSubstr("appears twice, in f0 and f1"));
  EXPECT_THAT(
      Cut({2, 2}).add({{0, 0}, {2, 2}}).add({{1, 1}, {1, 1}}).error(),
      HasSubstr("[1:2, 1:2] of int32[2, 2] appears twice, in f0 and f1"));
}

TEST(Chunks, RefusesWhatLeavesTheTensor) {
  int64_t most = INT64_MAX;
  for (const Chunk &chunk :
       {Chunk{{0}, {5}}, Chunk{{-1}, {2}}, Chunk{{5}, {0}}, Chunk{{most}, {1}},
        Chunk{{1}, {most}}, Chunk{{0}, {-1}}, Chunk{{}, {}},
        Chunk{{0, 0}, {1, 1}}, Chunk{{0}, {1, 1}}, Chunk{{0, 0}, {1}}}) {
    SavedTensor tensor{{{4}, plan::DType::Int32}, {{chunk, {}, "file"}}};
    try {
      checkTiling("folder", "w", tensor);
      FAIL() << describe(chunk);
    } catch (const runtime::InputError &error) {
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("file: tensor \"w\": expected a chunk within "
                                  "int32[4], got "),
                        HasSubstr(describe(chunk))));
    }
  }
  Cut shortOf({4});
  shortOf.add({{0}, {4}});
  shortOf.tensor.chunks[0].data = shortOf.tensor.chunks[0].data.first(15);
  EXPECT_EQ(shortOf.error(), "f0: tensor \"w\": expected 16 bytes for [0:4] of "
                             "int32[4], got 15");
  for (std::vector<int64_t> shape :
       {std::vector<int64_t>{-1}, {most}, {0, most, 4}})
    EXPECT_THAT(Cut(shape).error(), HasSubstr("less than 2^63 bytes"));
}

/// Cuts a box at random, until parts are small.
void cutAtRandom(const Chunk &box, std::mt19937 &random,
                 std::vector<Chunk> &parts) {
  size_t dim = box.sizes.empty() ? 0 : random() % box.sizes.size();
  if (box.sizes.empty() || box.sizes[dim] < 2 || random() % 5 == 0) {
    parts.push_back(box);
    return;
  }
  int64_t at = 1 + int64_t(random() % uint64_t(box.sizes[dim] - 1));
  Chunk low = box, high = box;
  low.sizes[dim] = at;
  high.offsets[dim] += at;
  high.sizes[dim] -= at;
  cutAtRandom(low, random, parts);
  cutAtRandom(high, random, parts);
}

Chunk randomBox(const std::vector<int64_t> &shape, std::mt19937 &random) {
  Chunk box;
  for (int64_t extent : shape) {
    box.offsets.push_back(int64_t(random() % uint64_t(extent + 1)));
    box.sizes.push_back(
        int64_t(random() % uint64_t(extent - box.offsets.back() + 1)));
  }
  return box;
}

/// Each defect that a random tiling can have is found, and each box is
/// gathered, as a count of every element says.
TEST(Chunks, AgreesWithCountingElements) {
  std::mt19937 random(7);
  const std::vector<int64_t> shapes[] = {
      {}, {9}, {4, 6}, {3, 4, 5}, {2, 3, 1, 4}};
  int defects = 0;
  for (int round = 0; round < 1500; ++round) {
    const std::vector<int64_t> &shape = shapes[round % 5];
    Chunk whole{std::vector<int64_t>(shape.size(), 0), shape};
    std::vector<Chunk> parts;
    cutAtRandom(whole, random, parts);
    std::shuffle(parts.begin(), parts.end(), random);
    if (random() % 2)
      parts[random() % parts.size()] = randomBox(shape, random);
    Cut cut(shape);
    std::vector<int> count(Cut::elements(shape, whole).size());
    for (const Chunk &part : parts) {
      cut.add(part);
      for (int32_t element : Cut::elements(shape, part))
        ++count[size_t(element)];
    }
    bool tiles = std::all_of(count.begin(), count.end(),
                             [](int times) { return times == 1; });
    ASSERT_EQ(cut.error().empty(), tiles) << cut.error();
    defects += !tiles;
    if (!tiles)
      continue;
    Chunk box = randomBox(shape, random);
    std::vector<int32_t> want = Cut::elements(shape, box), got(want.size());
    copyBox(cut.tensor, box, std::as_writable_bytes(std::span(got)));
    ASSERT_EQ(got, want) << describe(box);
  }
  EXPECT_GT(defects, 300);
}

TEST(Chunks, AreManyOfOneTensor) {
  for (bool columns : {false, true}) {
    SavedTensor tensor{{{100'000, 100'000}, plan::DType::Int8}, {}};
    // Borrowed, and not read.
    std::span<const std::byte> data(reinterpret_cast<std::byte *>(64), 100'000);
    for (int64_t i = 100'000; i-- > 0;) {
      Chunk chunk{{i, 0}, {1, 100'000}};
      if (columns) {
        std::swap(chunk.offsets[0], chunk.offsets[1]);
        std::swap(chunk.sizes[0], chunk.sizes[1]);
      }
      tensor.chunks.push_back({chunk, data, "f"});
    }
    EXPECT_NO_THROW(checkTiling("folder", "w", tensor));
    tensor.chunks.erase(tensor.chunks.begin() + 60'000);
    EXPECT_THROW(checkTiling("folder", "w", tensor), runtime::InputError);
  }
}

/// Boxes of {0, 1}^dims that tile it, in two colours.
struct Coloured {
  size_t dims = 0;
  std::vector<Chunk> boxes[2];
};

/// {0, 1}^3 in five boxes that no plane divides, with each of its bits being
/// the colour in `bit`: three bars, and the corners that they leave.
Coloured bars(const Coloured &bit) {
  Coloured all{3 * bit.dims, {}};
  const Chunk whole{std::vector<int64_t>(bit.dims, 0),
                    std::vector<int64_t>(bit.dims, 2)};
  const std::vector<Chunk> any = {whole};
  auto add = [&](int colour, const std::vector<Chunk> &x,
                 const std::vector<Chunk> &y, const std::vector<Chunk> &z) {
    for (const Chunk &a : x)
      for (const Chunk &b : y)
        for (const Chunk &c : z) {
          Chunk &box = all.boxes[colour].emplace_back();
          for (const Chunk *part : {&a, &b, &c}) {
            box.offsets.insert(box.offsets.end(), part->offsets.begin(),
                               part->offsets.end());
            box.sizes.insert(box.sizes.end(), part->sizes.begin(),
                             part->sizes.end());
          }
        }
  };
  add(1, bit.boxes[0], bit.boxes[1], any);
  add(1, any, bit.boxes[0], bit.boxes[1]);
  add(1, bit.boxes[1], any, bit.boxes[0]);
  add(0, bit.boxes[0], bit.boxes[0], bit.boxes[0]);
  add(0, bit.boxes[1], bit.boxes[1], bit.boxes[1]);
  return all;
}

/// Of the largest, a division by planes has far more parts than there are
/// chunks.
TEST(Chunks, AreNotDividedForever) {
  if (kAddressSanitizer)
    GTEST_SKIP() << "takes 40 s under AddressSanitizer: make test-unit runs it";
  Coloured tiling{1, {{{{0}, {1}}}, {{{1}, {1}}}}};
  std::string errors;
  for (int depth = 1; depth <= 3; ++depth) {
    tiling = bars(tiling);
    SavedTensor tensor{
        {std::vector<int64_t>(tiling.dims, 2), plan::DType::Int8}, {}};
    for (const std::vector<Chunk> &boxes : tiling.boxes)
      for (const Chunk &box : boxes) {
        size_t bytes = 1;
        for (int64_t size : box.sizes)
          bytes *= size_t(size);
        tensor.chunks.push_back(
            {box, {reinterpret_cast<std::byte *>(64), bytes}, "f"});
      }
    try {
      checkTiling("folder", "w", tensor);
    } catch (const runtime::InputError &error) {
      errors += std::to_string(depth) + error.what();
    }
  }
  EXPECT_THAT(errors, testing::StartsWith(
                          "3folder: tensor \"w\": expected chunks that"));
}

} // namespace
} // namespace fsdp::test
