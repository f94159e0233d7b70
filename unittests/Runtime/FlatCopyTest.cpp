//===- FlatCopyTest.cpp - the flat buffer against at::_chunk_cat ----------===//
#include "fsdp/Runtime/Collectives/FlatCopy.h"
#include "fsdp/Runtime/Devices/FlatLayout.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/ops/_chunk_cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace fsdp::test {
namespace {

using namespace runtime;
using at::ScalarType;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr ScalarType kFloats[] = {at::kFloat, at::kDouble, at::kHalf,
                                  at::kBFloat16};

/// Rows that no number of ranks divides, one row, a matrix of several tiles in
/// each row, and what is longer than a tile by one.
const std::vector<std::vector<int64_t>> kShapes = {
    {7, 3}, {1}, {4, 5, 2}, {1, 9001}, {11, kFlatTile}, {kFlatTile + 1}, {13}};

std::vector<at::Tensor> random(ScalarType dtype) {
  std::vector<at::Tensor> tensors;
  for (const std::vector<int64_t> &shape : kShapes)
    tensors.push_back(at::randn(shape, at::kDouble).mul_(100).to(dtype));
  return tensors;
}

/// What must not be left as it was.
at::Tensor stale(int64_t numel, ScalarType dtype) {
  return at::full({numel}, std::numeric_limits<double>::quiet_NaN(), dtype);
}

TEST(FlatCopyTest, CopyInIsChunkCatOfAnyDtypesAndRanks) {
  for (ScalarType from : kFloats)
    for (ScalarType to : kFloats)
      for (int64_t ranks = 1; ranks <= 5; ++ranks) {
        std::vector<at::Tensor> grads = random(from);
        at::Tensor expected = at::_chunk_cat(grads, 0, ranks).to(to);
        at::Tensor flat = stale(expected.numel(), to);
        copyIn(flat, grads, ranks);
        EXPECT_TRUE(at::equal(flat, expected.flatten()))
            << from << " to " << to << ", " << ranks << " ranks";
      }
}

TEST(FlatCopyTest, CopyInTakesMoreTensorsThanATableHas) {
  std::vector<at::Tensor> grads;
  for (int64_t i = 0; i < 2 * kFlatTensors + 3; ++i)
    grads.push_back(at::randn({i % 5 + 1, 3}));
  at::Tensor expected = at::_chunk_cat(grads, 0, 3).flatten();
  at::Tensor flat = stale(expected.numel(), at::kFloat);
  copyIn(flat, grads, 3);
  EXPECT_TRUE(at::equal(flat, expected));
}

TEST(FlatCopyTest, CopyInTakesDtypesStridesAndEmptyTensorsTogether) {
  std::vector<at::Tensor> grads = {
      at::randn({4, 3}).t(), at::randn({5, 2}).to(at::kBFloat16),
      at::randn({0, 3}), at::randn({2, 0}), at::randn({6}).to(at::kHalf)};
  at::Tensor expected = at::_chunk_cat(
      {grads[0].contiguous(), grads[1].to(at::kFloat), grads[4].to(at::kFloat)},
      0, 2);
  at::Tensor flat = stale(expected.numel(), at::kFloat);
  copyIn(flat, grads, 2);
  EXPECT_TRUE(at::equal(flat, expected.flatten()));
}

TEST(FlatCopyTest, RoundsToNearestEvenAndKeepsWhatIsNotFinite) {
  float infinity = std::numeric_limits<float>::infinity();
  // Half way between two bfloat16: below and above an even one; then what
  // rounds to infinity in float16 and a subnormal of it.
  std::vector<at::Tensor> grads = {at::empty({6})};
  float values[] = {1 + 0x1p-8F, 1 + 0x3p-8F, infinity,
                    -infinity,   65520,       1e-7F};
  std::copy_n(values, 6, grads[0].data_ptr<float>());
  for (ScalarType to : {at::kHalf, at::kBFloat16}) {
    at::Tensor flat = stale(6, to);
    copyIn(flat, grads, 1);
    EXPECT_TRUE(at::equal(flat, grads[0].to(to))) << flat;
  }
  at::Tensor flat = stale(6, at::kBFloat16);
  copyIn(flat, grads, 1);
  EXPECT_EQ(flat[0].item<float>(), 1);
  EXPECT_EQ(flat[1].item<float>(), 1 + 0x4p-8F);
}

TEST(FlatCopyTest, CopyOutSplitsARowOfCopyIn) {
  for (ScalarType from : kFloats)
    for (ScalarType to : kFloats)
      for (int64_t ranks = 1; ranks <= 5; ++ranks) {
        std::vector<at::Tensor> grads = random(from);
        at::Tensor matrix = at::_chunk_cat(grads, 0, ranks).contiguous();
        for (int64_t rank = 0; rank < ranks; ++rank) {
          std::vector<at::Tensor> shards;
          std::vector<at::Tensor> expected;
          std::vector<int64_t> strides;
          for (const at::Tensor &grad : grads) {
            int64_t per = (grad.size(0) + ranks - 1) / ranks;
            int64_t first = std::min(rank * per, grad.size(0));
            int64_t last = std::min(first + per, grad.size(0));
            expected.push_back(grad.slice(0, first, last).to(to));
            shards.push_back(at::full_like(expected.back(), 7));
            strides.push_back(per * (grad.numel() / grad.size(0)));
          }
          copyOut(shards, matrix[rank], strides);
          for (size_t i = 0; i < shards.size(); ++i)
            EXPECT_TRUE(at::equal(shards[i], expected[i]))
                << from << " to " << to << ", shard " << i << " of rank "
                << rank << " of " << ranks;
        }
      }
}

TEST(FlatCopyTest, RefusesWhatDoesNotFit) {
  auto message = [](const char *text) {
    return ThrowsMessage<RunError>(HasSubstr(text));
  };
  std::vector<at::Tensor> grads = {at::randn({3, 2})};
  EXPECT_THAT([&] { copyIn(at::empty({6}), grads, 2); },
              message("expected 8 elements for 2 ranks, got 6"));
  EXPECT_THAT([&] { copyIn(at::empty({8}, at::kInt), grads, 2); },
              message("expected float32, float64, float16 or bfloat16, got "
                      "Int"));
  EXPECT_THAT([&] { copyIn(at::empty({2}), {at::randn({})}, 2); },
              message("expected gradients with dimensions, got a scalar"));
  EXPECT_THAT([&] { copyOut({at::empty({3})}, at::empty({4}), {2}); },
              message("expected a stride of at least 3 for shard 0, got 2"));
  EXPECT_THAT([&] { copyOut({at::empty({3})}, at::empty({4}), {5}); },
              message("expected at least 5 elements, got 4"));
  EXPECT_THAT([&] { copyOut({at::empty({2, 3}).t()}, at::empty({6}), {6}); },
              message("expected contiguous memory for shard 0, got strides"));
}

/// Every element of the matrix is in one tile, and no tile is empty.
TEST(FlatLayoutTest, TilesCoverTheMatrixOnce) {
  FlatTable table;
  table.rows = 3;
  table.columns = 2 + kFlatTile * 2 + 5;
  addFlatTensor(table, nullptr, 5, 2, 0);
  addFlatTensor(table, nullptr, 0, 0, 2);
  addFlatTensor(table, nullptr, kFlatTile * 2 + 6, kFlatTile * 2 + 5, 2);
  std::vector<int> seen(size_t(table.rows * table.columns));
  int64_t copied = 0;
  for (int64_t tile = 0; tile < table.tiles; ++tile) {
    FlatRange range = flatRange(table, tile);
    EXPECT_GT(range.count + range.zeros, 0);
    copied += range.count;
    for (int64_t i = 0; i < range.count + range.zeros; ++i)
      ++seen.at(size_t(range.flat + i));
  }
  EXPECT_THAT(seen, testing::Each(1));
  EXPECT_EQ(copied, 5 + kFlatTile * 2 + 6);
}

} // namespace
} // namespace fsdp::test
